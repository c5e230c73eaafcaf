"""Reads and writes of positions in a sharded dim: every rank takes part with the elements that it holds.

A read is a sum over ranks, to which only the rank that holds an element adds it; a write changes the shard of the rank
that holds the element. What is sent is the size of what is read or written, whatever the length of the dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Partial, Reduction, Replicate, Shard
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.ops.lookup import filled, local_index, look_up_items, look_up_rows, missing, shard_starts
from spmd.rules.ops.one_dim import padded
from spmd.rules.rule import Axes, Body, Row

aten = torch.ops.aten
_LINES = (aten.index_add.default, aten.index_reduce.default)


def read_row(call: Call, dim: int, body: Body) -> Row:
    """The strategy of a read from shards of a dim: each rank adds what it has."""
    rest = (Replicate(),) * (len(call.operands) - 1)
    kind: Reduction = "max" if call.operands[0].dtype == torch.bool else "sum"
    return Row((Shard(dim), *rest), (Partial(kind),), body)


def write_row(call: Call, dim: int, body: Body) -> Row:
    """The strategy of a write to shards of a dim, of what all ranks have."""
    rest = (Replicate(),) * (len(call.operands) - 1)
    return Row((Shard(dim), *rest), (Shard(dim),), body)


def _along(mask: Tensor, dim: int, ndim: int) -> Tensor:
    """A mask of positions in `dim`, or of one position, that broadcasts with tensors of `ndim` dims."""
    return mask.reshape(-1, *(1,) * (ndim - dim - 1))


def _dim(call: Call, x: TensorMeta) -> int:
    return int(call.argument("dim")) % max(x.ndim, 1)


def _rows(x: Tensor, dim: int, index: Tensor, start: Tensor) -> Tensor:
    """The items of `x` at global positions, with the neutral element for those of other ranks."""
    local, held = local_index(index, start, x.shape[dim])
    rows = filled(x, dim).index_select(dim, local)
    return torch.where(_along(held, dim, x.ndim), rows, missing(rows))


# Positions that are known when the program is made


def _range(call: Call, size: int) -> range:
    """The positions that an operator of the kinds `select` and `slice` names in a dim of this size."""
    index = call.argument("index", None)
    if index is not None:
        return range(index % size, index % size + 1)
    return range(size)[call.argument("start") : call.argument("end") : call.argument("step")]


def _read_range(axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    (whole,) = call.operands
    dim = _dim(call, whole)
    places = _range(call, whole.shape[dim])
    index = torch.arange(places.start, places.stop, places.step, device=x.device)
    rows = _rows(x, dim, index, shard_offset(whole.shape[dim], axes))
    return rows if call.results[0].ndim == whole.ndim else rows.squeeze(dim)


def read_range(call: Call) -> Iterator[Row]:
    """A `select`, or a `slice` of less than half of a dim: more is cheaper to gather."""
    (x,) = call.operands
    dim = _dim(call, x)
    if x.ndim and 0 < 2 * len(_range(call, x.shape[dim])) < max(x.shape[dim], 3):
        yield read_row(call, dim, _read_range)


def _written(axes: Axes, call: Call, size: int, old: Tensor | None, new: Tensor, length: int) -> Tensor:
    """This rank's shard of the result of a write of `new` into zeros, or into its shard `old`."""
    dim = int(call.argument("dim")) % call.results[0].ndim
    places = _range(call, size)
    new = new if new.ndim == call.results[0].ndim else new.unsqueeze(dim)
    at = torch.arange(length, device=new.device) + shard_offset(size, axes) - places.start
    number = at.div(places.step, rounding_mode="floor")
    held = (number * places.step == at) & (number >= 0) & (number < len(places))
    if len(places) > 1:
        new = new.index_select(dim, torch.where(held, number, torch.zeros_like(number)))
    return torch.where(_along(held, dim, new.ndim), new, new.new_zeros(()) if old is None else old)


def _write_range(axes: Axes, call: Call, x: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    dim = _dim(call, call.operands[0])
    return _written(axes, call, call.operands[0].shape[dim], x, source, x.shape[dim])


def write_range(call: Call) -> Iterator[Row]:
    """A `select_scatter` or a `slice_scatter`."""
    x = call.operands[0]
    if x.ndim and _range(call, x.shape[_dim(call, x)]):
        yield write_row(call, _dim(call, x), _write_range)


def _spread_range(axes: Axes, call: Call, grad: Tensor, *_: Any, **__: Any) -> Tensor:
    dim = _dim(call, call.results[0])
    return _written(axes, call, call.argument("input_sizes")[dim], None, grad, call.results[0].shape[dim])


def spread_range(call: Call) -> Iterator[Row]:
    """The backward of a `select` or a `slice`."""
    result = call.results[0]
    if result.ndim and _range(call, result.shape[_dim(call, result)]):
        yield Row((Replicate(),), (Shard(_dim(call, result)),), _spread_range)


# Positions in tensors


def _spare(x: Tensor, dim: int) -> Tensor:
    """A shard with one more item at the end of a dim, for writes to other ranks' shards."""
    return padded(x, dim, 0, 1)


def _here(index: Tensor, start: Tensor, length: int) -> Tensor:
    """Positions in this rank's shard, and `length`, that of the spare item, for those of other ranks."""
    local, held = local_index(index, start, length)
    return torch.where(held, local, torch.full_like(local, length))


def _read_items(axes: Axes, call: Call, x: Tensor, _: int, index: Tensor) -> Tensor:
    dim, places = _dim(call, call.operands[0]), index.reshape(-1)
    return _rows(x, dim, places, shard_starts(places, call.operands[0].shape[dim], axes, look_up_rows))


def read_items(call: Call) -> Iterator[Row]:
    """An `index_select`."""
    x = call.operands[0]
    if x.ndim:
        yield read_row(call, _dim(call, x), _read_items)


def _write_items(axes: Axes, call: Call, x: Tensor, _: int, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    whole = call.operands[0]
    dim, length = _dim(call, whole), x.shape[_dim(call, whole)]
    # Of these operators index_reduce, and index_add with a factor, check positions as index_select does.
    by_row = call.op is aten.index_reduce.default or call.argument("alpha", 1) != 1
    start = shard_starts(index, whole.shape[dim], axes, look_up_rows if by_row else look_up_items)
    return call.op(_spare(x, dim), dim, _here(index, start, length), *args, **kwargs).narrow(dim, 0, length)


def write_items(call: Call) -> Iterator[Row]:
    """A write to positions along the argument `dim`: an `index_add`, a `scatter`."""
    x, index = call.operands[:2]
    if x.ndim and (index.ndim == x.ndim or call.op in _LINES):
        yield write_row(call, _dim(call, x), _write_items)


@attrs.frozen
class _IndexStart:
    """The lookup of `x[..., index]` in the dim `dim`, which takes negative positions, too."""

    dim: int

    def __call__(self, table: Tensor, index: Tensor) -> Tensor:
        whole = table.reshape(*(1,) * self.dim, -1)
        return aten.index.Tensor(whole, [*(None,) * self.dim, index]).reshape(index.shape)


def _broadcast(held: Tensor, indices: Sequence[Tensor | None], ndim: int) -> Tensor:
    """A mask of positions that broadcasts with `self[indices]`, for `self` with `ndim` dims."""
    at = [dim for dim, each in enumerate(indices) if each is not None]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    return held.reshape([*held.shape, *(1,) * (ndim - len(at) - first)])


@attrs.frozen
class _Index:
    """Reads at `self[indices]` of which those in the dim `dim` name items of shards."""

    dim: int

    def __call__(self, axes: Axes, call: Call, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
        index, start = _positions(axes, call, self.dim, indices)
        local, held = local_index(index, start, x.shape[self.dim])
        items = aten.index.Tensor(filled(x, self.dim), _with(indices, self.dim, local))
        return torch.where(_broadcast(held, indices, x.ndim), items, missing(items))


@attrs.frozen
class _IndexPut:
    """Writes at `self[indices]` of which those in the dim `dim` name items of shards."""

    dim: int

    def __call__(
        self, axes: Axes, call: Call, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, add: bool = False
    ) -> Tensor:
        (index, start), length = _positions(axes, call, self.dim, indices), x.shape[self.dim]
        if add:  # nothing is added for other ranks' items, so that there is no need for a spare one
            local, held = local_index(index, start, length)
            x, values = filled(x, self.dim), torch.where(_broadcast(held, indices, x.ndim), values, missing(values))
        else:
            local, x = _here(index, start, length), _spare(x, self.dim)
        return call.op(x, _with(indices, self.dim, local), values, add).narrow(self.dim, 0, length)


def _positions(axes: Axes, call: Call, dim: int, indices: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """The nonnegative positions in the dim, and the start of this rank's shard once for each."""
    index, size = indices[dim], call.operands[0].shape[dim]
    assert index is not None
    return torch.where(index < 0, index + size, index), shard_starts(index, size, axes, _IndexStart(dim))


def _with(indices: Sequence[Tensor | None], dim: int, index: Tensor) -> list[Tensor | None]:
    return [index if number == dim else each for number, each in enumerate(indices)]


def read_index(call: Call) -> Iterator[Row]:
    """An `index.Tensor`."""
    for dim, index in enumerate(call.argument("indices")):
        if index is not None:
            yield read_row(call, dim, _Index(dim))


def write_index(call: Call) -> Iterator[Row]:
    """An `index_put` at positions."""
    for dim, index in enumerate(call.argument("indices")):
        if index is not None:
            yield write_row(call, dim, _IndexPut(dim))
