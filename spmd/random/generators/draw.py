"""The operators that draw: `draw`, of which a rank computes any box of elements, and `derive_key`.

An element has an index in the flattened unsharded result, and depends on the key and this index only. Integers are made
in blocks of counters that fit in caches, so that a draw takes little memory beside its result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.random.generators.distributions import samples, width
from spmd.random.generators.implementations import GENERATORS

_BLOCK, _DEVICE_BLOCK = 2**15, 2**22
"""The counters that are computed at once on a processor, whose second cache holds them, and on other devices."""

_LIBRARY = torch.library.Library("spmd_random", "FRAGMENT")


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """The distance of neighbours in each dim, in the flattened tensor.

    >>> contiguous_strides((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


@attrs.frozen
class _Box:
    """The elements of a box, as runs of neighbours in the flattened unsharded result.

    Args:
        run: the number of elements in a run.
        lengths, strides: the dims that runs are counted by, and the distance of neighbours in each.
        start: the index of the first element.
    """

    run: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], start: int) -> _Box:
        """The box of a shape, with the distance of neighbours in each dim."""
        dims = [(length, stride) for length, stride in zip(shape, strides, strict=True) if length != 1]
        run = 1
        while dims and dims[-1][1] == run:
            run *= dims.pop()[0]
        return cls(run, tuple(length for length, _ in dims), tuple(stride for _, stride in dims), start)

    @property
    def count(self) -> int:
        """The number of runs."""
        return math.prod(self.lengths)

    def starts(self, runs: Tensor) -> Tensor:
        """The indices at which runs begin, i64[runs]."""
        found = torch.full_like(runs, self.start)
        for length, stride, inner in zip(self.lengths, self.strides, contiguous_strides(self.lengths), strict=True):
            found += runs // inner % length * stride
        return found

    def shift(self, count: int) -> int | None:
        """The remainder of all starts by a number; None if they differ."""
        return None if any(stride % count for stride in self.strides) else self.start % count


def _draw(
    key: Tensor,
    size: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    impl: str,
    strides: Sequence[int] | None = None,
    start: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    found = torch.empty(size, dtype=dtype, device=key.device)
    event = size[key.ndim - 1 :]
    if found.numel():
        own = contiguous_strides(event) if strides is None else strides
        box = _Box.of(event, own, 0 if start is None else int(start))
        _fill(found.view(-1, box.run), key.reshape(-1, 1, 2), box, kind, impl, level)
    return found


def _fill(found: Tensor, keys: Tensor, box: _Box, kind: str, impl: str, level: int) -> None:
    """Fill the runs of a box for each key, as many at once as fit in a block.

    Args:
        found: [keys * runs, elements of a run].
        keys: i64[keys, 1, 2].
        box: the elements.
        kind: what they are.
        impl: the generator.
        level: the least integer for which a mask is one.
    """
    generator, dtype, device = GENERATORS[impl], found.dtype, found.device
    bits = width(kind, dtype, generator.mantissa_width)
    per = generator.per_counter(bits)
    common, most = box.shift(per), _BLOCK if device.type == "cpu" else _DEVICE_BLOCK
    together = max(1, most // _blocks(box.run, per - 1 if common is None else common, per))
    for first in range(0, len(found), together):
        rows = torch.arange(first, min(first + together, len(found)), device=device)
        key = keys if len(keys) == 1 else keys[rows // box.count]
        starts = box.starts(rows % box.count).unsqueeze(1)
        target = found[first : first + together]
        shift = int(starts) % per if together == 1 else common
        if shift is None:
            counters = starts // per + torch.arange(_blocks(box.run, per - 1, per), device=device)
            made = generator.patterns(key, counters, bits).flatten(1)
            made = made.gather(1, starts % per + torch.arange(box.run, device=device))
            target.copy_(samples(kind, made, dtype, level))
            continue
        for begin, end in _ranges(_blocks(box.run, shift, per), most):
            counters = starts // per + torch.arange(begin, end, device=device)
            made = samples(kind, generator.patterns(key, counters, bits).flatten(1), dtype, level)
            low, high = max(0, begin * per - shift), min(box.run, end * per - shift)
            target[:, low:high].copy_(made[:, low + shift - begin * per : high + shift - begin * per])


def _blocks(run: int, shift: int, per: int) -> int:
    """The counters of a run that begins at element `shift` of the first one."""
    return -(-(run + shift) // per)


def _ranges(count: int, most: int) -> Iterator[tuple[int, int]]:
    """The ends of parts of a range, of at most so many."""
    return itertools.pairwise([*range(0, count, most), count])


def _derive_key(key: Tensor, data: Tensor, impl: str) -> Tensor:
    return GENERATORS[impl].derived(key, torch.broadcast_tensors(key[..., 0], data)[1])


def _fake_derived_key(key: Tensor, data: Tensor, impl: str) -> Tensor:
    return key.new_empty((*torch.broadcast_tensors(key[..., 0], data)[0].shape, 2))


def _batched_draw(info: Any, in_dims: Any, key: Tensor, size: Sequence[int], *args: Any) -> tuple[Tensor, int]:
    """The rule for vmap: each key of a batch draws as it does alone."""
    return DRAW(key.movedim(in_dims[0], 0), [info.batch_size, *size], *args), 0


def _batched_derive_key(info: Any, in_dims: Any, key: Tensor, data: Tensor, impl: str) -> tuple[Tensor, int]:
    pairs = zip((key, data), in_dims, strict=False)
    moved = [x.unsqueeze(0) if dim is None else x.movedim(dim, 0) for x, dim in pairs]
    return DERIVE_KEY(*moved, impl), 0


def _define(schema: str, kernel: Any, fake: Any, batch: Any) -> torch._ops.OpOverload:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"spmd_random::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"spmd_random::{name}", batch, lib=_LIBRARY)
    return getattr(torch.ops.spmd_random, name).default  # type: ignore[no-any-return]


DRAW = _define(
    "draw(Tensor key, int[] size, str kind, ScalarType dtype, str impl, int[]? strides=None, Tensor? start=None, "
    "int level=0) -> Tensor",
    _draw,
    lambda key, size, kind, dtype, *_: torch.empty(size, dtype=dtype, device=key.device),
    _batched_draw,
)
"""The elements of a draw by each of the keys i64[keys..., 2]: [keys..., event...].

Args:
    size: the shape of the result.
    kind: one of `KINDS`; `bits` are integers of as many bits as `dtype` has.
    strides, start: of a box of the elements of a larger draw, the distance of neighbours in each dim of the event, in
        the flattened draw, and the index of the first element, i64[].
    level: a mask is one where 16 random bits, as a signed integer, are at least this.
"""
DERIVE_KEY = _define(
    "derive_key(Tensor key, Tensor data, str impl) -> Tensor",
    _derive_key,
    _fake_derived_key,
    _batched_derive_key,
)
"""The keys that numbers i64[keys...] make of keys i64[keys..., 2]; lengths of 1 broadcast."""
