"""Draws by keys: every rank has the keys, and computes the elements of its shard.

The index of an element in the unsharded result is that of the first element of the shard, and the place in the shard
times the strides of the unsharded result: so shards along several dims are boxes, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Replicate, Shard
from spmd.ir.call import Call
from spmd.random.generators.draw import DERIVE_KEY, DRAW, contiguous_strides
from spmd.rules.builders import dim_names, rule
from spmd.rules.nested import Along
from spmd.rules.notation import factors, spell, term
from spmd.rules.rule import Axes, Factors, Row, Table


def _first(call: Call) -> int:
    """The first dim of the result that is not one of the keys."""
    return call.operands[0].ndim - 1


def _shard(
    axes: Axes,
    call: Call,
    inner: Any,
    dim: int,
    key: Tensor,
    size: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    impl: str,
    strides: Sequence[int] | None = None,
    start: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """A draw whose result is sharded in `dim`, by the box of its elements."""
    whole, first = call.argument("size"), _first(call)
    strides = contiguous_strides(whole[first:]) if strides is None else strides
    offset = shard_offset(whole[dim], axes) * strides[dim - first]
    start = offset if start is None else start + offset
    return inner(key, size, kind, dtype, impl, strides, start, level)  # type: ignore[no-any-return]


def _boxes(call: Call) -> Iterator[Row]:
    """A result that is sharded in a dim that the keys do not have."""
    for dim in range(_first(call), call.results[0].ndim):
        yield Row((Replicate(),), (Shard(dim),), Along(dim, _shard, block=1))


def _keys(call: Call) -> Factors:
    """The factors of the dims that keys and results share."""
    names = dim_names(_first(call))
    return spell(call, [f"{term(names)} _"], [f"{term(names)} *"])


KEYED_DRAWS: Table = {
    DRAW: rule(_keys, _boxes, size_argument=1),
    DERIVE_KEY: factors("... _, ... -> ... _"),
}
"""The operators of `spmd.random`."""
