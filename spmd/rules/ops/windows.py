"""Windows: the rows of sharded dims that a rank's shards of the results are made of, exchanged between neighbours.

A row of the result of a slice, roll, flip, pad, `cat` or `split` is a row of an operand, or a fill value. So the shards
of the results are a few intervals of the operands' global rows (`WindowExchange`). It is offered where most rows of a
result, or of the operand, are in the other, and where there are few rows or few pieces: else there are as many
distances as ranks, and what is sent is what any other exchange sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Replicate, Shard
from spmd.ir.call import Call
from spmd.rules.nested import Along, Inner
from spmd.rules.ops.by_rank import chunks
from spmd.rules.ops.one_dim import resized
from spmd.rules.ops.window_exchange import (
    FEW,
    FILL,
    Interval,
    Intervals,
    WindowExchange,
    between_fills,
    is_near,
    windows,
)
from spmd.rules.rule import Axes, Row

aten = torch.ops.aten


def _rows(call: Call, dim: int, body: Callable[..., Any], replicated: int = 0) -> Row:
    """A strategy that shards the dim of all operands but the last `replicated` ones, and of all results."""
    count = len(call.operands) - replicated
    return Row((*(Shard(dim),) * count, *(Replicate(),) * replicated), (Shard(dim),) * len(call.results), body)


def _exchange(axes: Axes, call: Call, dim: int, size: int, intervals: Intervals) -> WindowExchange:
    return WindowExchange(dim, axes, tuple(meta.shape[dim] for meta in call.operands), windows(size, axes, intervals))


def _dim(call: Call) -> int:
    return int(call.argument("dim")) % max(call.operands[0].ndim, 1)


# Slices


def _bounds(call: Call, size: int) -> range:
    return range(size)[call.argument("start") : call.argument("end") : call.argument("step")]


def _slice_body(axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> Tensor:
    dim = _dim(call)
    places = _bounds(call, call.operands[0].shape[dim])
    step = places.step

    def interval(start: int, stop: int) -> list[Interval]:
        return [(0, places[start], places[stop - 1] + 1)]

    rows = call.results[0].shape[dim]
    found = _exchange(axes, call, dim, len(places), interval)([x], (rows - 1) * step + 1 if rows else 0)
    return found if step == 1 else found[(slice(None),) * dim + (slice(None, None, step),)]


def slice_window(call: Call) -> Iterator[Row]:
    """A slice, in any steps."""
    (x,) = call.operands
    size = x.shape[_dim(call)] if x.ndim else 0
    places = _bounds(call, size)
    if places and is_near(places[-1] + 1 - places[0], size):
        yield _rows(call, _dim(call), _slice_body)


def _slice_backward_body(axes: Axes, call: Call, grad: Tensor, *_: Any, **__: Any) -> Tensor:
    dim, length = _dim(call), call.results[0].shape[_dim(call)]
    size = call.argument("input_sizes")[dim]
    places = _bounds(call, size)
    step = places.step

    def intervals(start: int, stop: int) -> list[Interval]:
        begin, end = (-((places.start - edge) // step) for edge in (start, stop))
        pieces = [(FILL, begin, min(end, 0)), (0, max(begin, 0), min(end, len(places)))]
        pieces = [piece for piece in pieces if piece[1] < piece[2]]
        missing = -(-(stop - start) // step) - sum(last - first for _, first, last in pieces)
        return [*pieces, (FILL, 0, missing)] if missing else pieces

    rows = _exchange(axes, call, dim, size, intervals)([grad], -(-length // step))
    if step == 1 or not length:
        return rows
    firsts = {(places.start - start) % step for start, stop in chunks(size, axes) if start < stop}
    spread = resized(rows.shape, dim, rows.shape[dim] * step - (step - 1))
    if len(firsts) == 1:
        (first,) = firsts
        spread[dim] = max(spread[dim] + first, length)
        found = aten.slice_backward.default(rows, spread, dim, first, spread[dim], step)
    else:
        spread[dim] += step - 1
        at = torch.arange(rows.shape[dim], device=rows.device) * step
        at = at + (places.start - shard_offset(size, axes)) % step
        found = rows.new_zeros(spread).index_copy(dim, at, rows)
    return found.narrow(dim, 0, length)


def slice_backward_window(call: Call) -> Iterator[Row]:
    """The backward of a slice, in any steps: the rows of each shard are exchanged, and then spread."""
    (grad,), (result,) = call.operands, call.results
    places = _bounds(call, result.shape[_dim(call)]) if grad.ndim else range(0)
    if places and is_near(places[-1] + 1 - places[0], result.shape[_dim(call)]):
        yield _rows(call, _dim(call), _slice_backward_body)


def _slice_scatter_body(axes: Axes, call: Call, x: Tensor, source: Tensor, *_: Any, **__: Any) -> Tensor:
    dim = _dim(call)
    places = _bounds(call, call.operands[0].shape[dim])

    def intervals(start: int, stop: int) -> list[Interval]:
        first, last = places.start, places.start + len(places)
        pieces = [(0, start, min(stop, first)), (1, max(start, first) - first, min(stop, last) - first)]
        pieces.append((0, max(start, last), stop))
        return [piece for piece in pieces if piece[1] < piece[2]]

    return _exchange(axes, call, dim, call.operands[0].shape[dim], intervals)([x, source], x.shape[dim])


def slice_scatter_window(call: Call) -> Iterator[Row]:
    """A write into a slice in steps of 1."""
    x, source = call.operands
    if x.ndim and call.argument("step") == 1 and is_near(source.shape[_dim(call)], x.shape[_dim(call)]):
        yield _rows(call, _dim(call), _slice_scatter_body)


# Pads, rolls, flips, joins


def _pad(axes: Axes, call: Call, inner: Inner, dim: int, x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    place = 2 * (x.ndim - 1 - dim)
    whole, (result,) = call.operands[0].shape[dim], call.results
    intervals = between_fills(pad[place], whole)
    found = _exchange(axes, call, dim, whole + pad[place] + pad[place + 1], intervals)([x], result.shape[dim], value)
    rest = [0 if n in (place, place + 1) else amount for n, amount in enumerate(pad)]
    return inner(found, rest, value) if any(rest) else found


def pad_window(call: Call) -> Iterator[Row]:
    """A pad of the last dims by one value."""
    (x,) = call.operands[:1]
    if len(call.operands) == 1:
        for number in range(0, len(call.argument("pad")), 2):
            dim = x.ndim - 1 - number // 2
            sizes = sorted((x.shape[dim], call.results[0].shape[dim]))
            if any(call.argument("pad")[number : number + 2]) and is_near(*sizes):
                yield _rows(call, dim, Along(dim, _pad))


def _roll(
    axes: Axes, call: Call, inner: Inner, dim: int, x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> Tensor:
    size = call.operands[0].shape[dim]
    by = [(shift, other % x.ndim) for shift, other in zip(shifts, dims, strict=True)]
    shift = sum(shift for shift, other in by if other == dim) % size

    def intervals(start: int, stop: int) -> list[Interval]:
        first, last = start - shift, stop - shift
        pieces = [(0, first + size, min(last, 0) + size), (0, max(first, 0), last)]
        return [piece for piece in pieces if piece[1] < piece[2]]

    found = _exchange(axes, call, dim, size, intervals)([x], x.shape[dim])
    rest = [item for item in by if item[1] != dim]
    return inner(found, *map(list, zip(*rest, strict=True))) if rest else found


def roll_window(call: Call) -> Iterator[Row]:
    """A roll along dims."""
    (x,) = call.operands
    for dim in {dim % x.ndim for dim in call.argument("dims")}:
        if x.shape[dim]:
            yield _rows(call, dim, Along(dim, _roll))


def _flip(axes: Axes, call: Call, inner: Inner, dim: int, x: Tensor, dims: Sequence[int]) -> Tensor:
    size = call.operands[0].shape[dim]
    exchange = _exchange(axes, call, dim, size, lambda start, stop: [(0, size - stop, size - start)])
    return inner(exchange([x], x.shape[dim]), dims)


def flip_window(call: Call) -> Iterator[Row]:
    """A flip of dims."""
    (x,) = call.operands
    for dim in {dim % x.ndim for dim in call.argument("dims")}:
        yield _rows(call, dim, Along(dim, _flip))


def _cat_body(axes: Axes, call: Call, tensors: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
    dim = _dim(call)
    ends = list(itertools.accumulate(meta.shape[dim] for meta in call.operands))

    def intervals(start: int, stop: int) -> list[Interval]:
        found = []
        for number, end in enumerate(ends):
            begin = end - call.operands[number].shape[dim]
            if max(start, begin) < min(stop, end):
                found.append((number, max(start, begin) - begin, min(stop, end) - begin))
        return found

    return _exchange(axes, call, dim, ends[-1], intervals)(tensors, call.results[0].shape[dim]).to(
        call.results[0].dtype
    )


def cat_window(call: Call) -> Iterator[Row]:
    """A `cat` along the dim."""
    (result,) = call.results
    if not result.ndim or any(meta.ndim != result.ndim for meta in call.operands):
        return
    dim = _dim(call)
    if len(call.operands) <= FEW < result.shape[dim] or is_near(
        max(meta.shape[dim] for meta in call.operands), result.shape[dim]
    ):
        yield _rows(call, dim, _cat_body)


def _lengths(call: Call) -> list[int]:
    """The global lengths of the pieces of a `split`."""
    size, pieces = call.operands[0].shape[_dim(call)], call.argument("split_sizes", None)
    if pieces is not None:
        return list(pieces)
    piece = int(call.argument("split_size"))
    return [min(piece, size - start) for start in range(0, size, piece)]


def _split_body(axes: Axes, call: Call, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    dim, gotten = _dim(call), [list[Interval]() for _ in chunks(0, axes)]
    for begin, end in itertools.pairwise(itertools.accumulate(_lengths(call), initial=0)):
        for intervals, (start, stop) in zip(gotten, chunks(end - begin, axes), strict=True):
            intervals += [(0, begin + start, begin + stop)] if start < stop else []
    rows = [meta.shape[dim] for meta in call.results]
    return WindowExchange(dim, axes, (call.operands[0].shape[dim],), gotten)([x], sum(rows)).split(rows, dim)


def split_window(call: Call) -> Iterator[Row]:
    """A split into two pieces, or one: an exchange for both. Those of more are of layers, whose search it slows."""
    if call.operands[0].ndim and any(_lengths(call)) and len(call.results) <= 2:
        yield _rows(call, _dim(call), _split_body)
