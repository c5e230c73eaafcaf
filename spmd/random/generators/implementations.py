"""The generators by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from spmd.random.generators import philox, threefry


@attrs.frozen
class Generator:
    """A counter-based generator: keys and counters to integers.

    Args:
        patterns: `patterns(key, counters, width)`: integers of `width` bits, some of each counter, in a new last dim.
        per_counter: `per_counter(width)`: how many of each counter.
        derived: `derived(key, data)`: the keys that numbers make of keys.
        seeded: the key of a seed, i64[].
        mantissa_width: the bits that an element of a floating dtype is drawn from.
    """

    patterns: Callable[[Tensor, Tensor, int], Tensor]
    per_counter: Callable[[int], int]
    derived: Callable[[Tensor, Tensor], Tensor]
    seeded: Callable[[Tensor], Tensor]
    mantissa_width: Callable[[torch.dtype], int]


GENERATORS: Mapping[str, Generator] = MappingProxyType({
    name: Generator(
        module.patterns, module.per_counter, module.derived, module.seeded, module.mantissa_width
    )
    for name, module in (("philox4x32", philox), ("threefry2x32", threefry))
})  # fmt: skip
"""What `impl` of a key may be."""
