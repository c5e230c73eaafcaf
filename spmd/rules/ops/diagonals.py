"""Diagonals of matrices whose rows or columns are sharded, of which each rank has a part.

A diagonal that is replicated is a sum over ranks, to which each adds its part, or is written where it belongs. One
that is sharded is exchanged between shards of its own length and those of the matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Shard
from spmd.ir.call import Call
from spmd.rules.ops.lookup import filled, local_index, missing
from spmd.rules.ops.owners import read_row, write_row
from spmd.rules.ops.window_exchange import WindowExchange, between_fills, is_near, windows
from spmd.rules.rule import Axes, Row

aten = torch.ops.aten


@attrs.frozen
class _Cut:
    """The dim of matrices that is sharded.

    Args:
        dim: the dim.
        other: the other dim of the matrices.
        first, other_first: the place in each of the diagonal's first item.
        size: the global length of the dim.
    """

    dim: int
    other: int
    first: int
    other_first: int
    size: int

    @classmethod
    def of(cls, call: Call, number: int) -> _Cut:
        """The rows (0), or the columns (1), of the matrices of a `diagonal` or a `diagonal_scatter`."""
        shape, offset = call.operands[0].shape, int(call.argument("offset"))
        dims = [int(call.argument(name)) % len(shape) for name in ("dim1", "dim2")]
        firsts = [max(-offset, 0), max(offset, 0)]
        return cls(dims[number], dims[1 - number], firsts[number], firsts[1 - number], shape[dims[number]])

    def lines(self, x: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
        """This rank's lines of matrices, in the last two dims; and the place of the diagonal in each, if it has one."""
        place = torch.arange(x.shape[self.dim], device=x.device) + shard_offset(self.size, axes)
        return x.movedim((self.dim, self.other), (-2, -1)), place - self.first + self.other_first


@attrs.frozen
class _ReadDiagonal:
    """`diagonal`, for which each rank reads what its lines have."""

    number: int

    def __call__(self, axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
        cut, places = _Cut.of(call, self.number), torch.arange(call.results[0].shape[-1], device=x.device)
        local, held = local_index(places + cut.first, shard_offset(cut.size, axes), x.shape[cut.dim])
        lines = filled(x, cut.dim).movedim((cut.dim, cut.other), (-2, -1))
        items = aten.index.Tensor(lines, [*(None,) * (x.ndim - 2), local, places + cut.other_first])
        return torch.where(held, items, missing(items))


@attrs.frozen
class _ReadShard:
    """`diagonal` with a sharded result: each line has an item, and these are exchanged."""

    number: int

    def __call__(self, axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
        cut = _Cut.of(call, self.number)
        lines, place = cut.lines(x, axes)
        place = place.clamp(0, lines.shape[-1] - 1).expand(lines.shape[:-1]).unsqueeze(-1)
        items, length = lines.gather(-1, place).squeeze(-1), _diagonal_length(call)
        window = windows(length, axes, lambda start, stop: [(0, start + cut.first, stop + cut.first)])
        return WindowExchange(items.ndim - 1, axes, (cut.size,), window)([items], call.results[0].shape[-1])


@attrs.frozen
class _WriteDiagonal:
    """`diagonal_scatter` of a diagonal that all ranks have, or of one that is sharded and exchanged."""

    number: int
    is_sharded: bool = False

    def __call__(self, axes: Axes, call: Call, x: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
        cut = _Cut.of(call, self.number)
        lines, place = cut.lines(x, axes)
        if self.is_sharded:
            window = windows(cut.size, axes, between_fills(cut.first, _diagonal_length(call)))
            exchange = WindowExchange(source.ndim - 1, axes, (_diagonal_length(call),), window)
            new = exchange([source], lines.shape[-2])
        else:
            new = source.index_select(-1, (place - cut.other_first).clamp(0, source.shape[-1] - 1))
        on = torch.arange(lines.shape[-1], device=x.device) == place.unsqueeze(-1)
        return torch.where(on, new.unsqueeze(-1), lines).movedim((-2, -1), (cut.dim, cut.other))


def _diagonal_length(call: Call) -> int:
    """The global length of the diagonal."""
    first, second = _Cut.of(call, 0), _Cut.of(call, 1)
    return max(min(first.size - first.first, second.size - second.first), 0)


def read_diagonal(call: Call) -> Iterator[Row]:
    """A `diagonal`."""
    for number in range(2) if _diagonal_length(call) else ():
        cut = _Cut.of(call, number)
        yield read_row(call, cut.dim, _ReadDiagonal(number))
        if is_near(_diagonal_length(call), cut.size):
            yield Row((Shard(cut.dim),), (Shard(call.results[0].ndim - 1),), _ReadShard(number))


def write_diagonal(call: Call) -> Iterator[Row]:
    """A `diagonal_scatter`."""
    for number in range(2) if _diagonal_length(call) else ():
        cut = _Cut.of(call, number)
        yield write_row(call, cut.dim, _WriteDiagonal(number))
        if is_near(_diagonal_length(call), cut.size):
            source = Shard(call.operands[1].ndim - 1)
            yield Row((Shard(cut.dim), source), (Shard(cut.dim),), _WriteDiagonal(number, is_sharded=True))
