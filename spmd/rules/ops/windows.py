"""Windows: the rows of sharded dims that a rank's shard of the result is made of, exchanged between neighbours.

A row of the result of a slice, roll, flip, pad or `cat` is a row of an operand, or a fill value. So a shard of the
result is a few intervals of the operands' global rows. Each interval is cut where another rank's shard begins, and
the parts of all ranks at one distance are sent in one permute; distances between different ranks share it. What is sent
is what changes its owner. It is offered where most rows of the result, or of the operand, are in the other: else there
are as many distances as ranks, and what is sent is what any other exchange sends.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives import ppermute, shard_offset
from spmd.core.placement import Replicate, Shard
from spmd.ir.call import Call
from spmd.rules.nested import Along, Inner
from spmd.rules.ops.by_rank import by_rank, chunks
from spmd.rules.rule import Axes, Row

aten = torch.ops.aten

FILL = -1
"""The operand number of rows that have a fill value."""

Interval: TypeAlias = tuple[int, int, int]
"""Rows of an operand: its number, the first row, and the row after the last."""

Intervals: TypeAlias = Callable[[int, int], list[Interval]]
"""The intervals that the rows from `start` to `stop` of the result are, in order."""


@attrs.frozen
class _TakenRows:
    """Rows that a rank takes from what it has after the exchange.

    Args:
        source: the operand, and the number of the permute that brings them, from 1; 0 for rows of the rank itself.
        sender: the rank that has them.
        start: the first row: of the sender's shard.
        length: the number of rows.
    """

    source: tuple[int, int]
    sender: int
    start: int
    length: int


@attrs.frozen
class WindowExchange:
    """An exchange of rows of operands whose dim `dim` is sharded over `axes`.

    Args:
        dim: the dim.
        axes: the mesh axes.
        sizes: the global length of the dim of each operand.
        size: that of the result.
        intervals: what the result is made of.
    """

    dim: int
    axes: Axes
    sizes: tuple[int, ...]
    size: int
    intervals: Intervals

    def __call__(self, operands: Sequence[Tensor], length: int, fill: Any = 0) -> Tensor:
        """This rank's shard of the result, with `length` rows, from its shards of the operands."""
        dim, every = self.dim, self._parts()
        alike = [
            rank
            for rank, parts in enumerate(every)
            if sum(part.length for part in parts) == length
            and all(stop - start == x.shape[dim] for x, (start, stop) in zip(operands, self._shards(rank), strict=True))
        ]
        pieces = {(number, 0): x for number, x in enumerate(operands)}
        like = operands[0]
        moved = Counter[tuple[int, int]]()
        for part in itertools.chain(*every):
            if part.source[1]:
                moved[part.source] = max(moved[part.source], part.length)
        for source, rows in sorted(moved.items()):
            pieces[source] = self._send(operands[source[0]], source, rows, every, alike)
        if any(part.source[0] == FILL for parts in every for part in parts):
            rows = max(part.length for parts in every for part in parts if part.source[0] == FILL)
            shape = [rows if i == dim else n for i, n in enumerate(like.shape)]
            pieces[FILL, 0] = like.new_full(shape, fill)
        layouts = {tuple(self._place(part) for part in every[rank]) for rank in alike}
        if len(layouts) == 1:
            found = [pieces[source].narrow(dim, start, rows) for source, start, rows in layouts.pop() if rows]
            return torch.cat(found, dim) if len(found) > 1 else [*found, like.narrow(dim, 0, 0)][0]
        return self._selected(pieces, every, length)

    def _selected(self, pieces: dict[tuple[int, int], Tensor], every: list[list[_TakenRows]], length: int) -> Tensor:
        """The rows where ranks with equal shapes take different ones: looked up in all that they have."""
        dim = self.dim
        firsts, first = {}, 0
        for source, x in pieces.items():
            firsts[source], first = first, first + x.shape[dim]
        place = torch.arange(length, device=next(iter(pieces.values())).device)
        found = torch.zeros_like(place)
        for number in range(max(map(len, every))):
            begins, offsets = [], []
            for parts in every:
                begin = sum(part.length for part in parts[:number])
                begins.append(begin if number < len(parts) else length)
                source, start, _ = self._place(parts[number]) if number < len(parts) else ((0, 0), 0, 0)
                offsets.append(firsts.get(source, 0) + start - begin)
            found = torch.where(place >= self._mine(begins, place), place + self._mine(offsets, place), found)
        return torch.cat(list(pieces.values()), dim).index_select(dim, found)

    def _mine(self, values: list[int], like: Tensor) -> Tensor | int:
        return by_rank(values, self.axes, like.device)

    @staticmethod
    def _place(part: _TakenRows) -> tuple[tuple[int, int], int, int]:
        """Where a part is: a sent one begins at its own first row."""
        return part.source, 0 if part.source[1] else part.start, part.length

    def _send(
        self, x: Tensor, source: tuple[int, int], rows: int, every: list[list[_TakenRows]], alike: Sequence[int]
    ) -> Tensor:
        count = len(every)
        sent = [(part, rank) for rank, parts in enumerate(every) for part in parts if part.source == source]
        starts = {part.sender: part.start for part, _ in sent}
        here = {starts[rank] for rank in alike if rank in starts} or {0}
        pairs = [(part.sender, rank) for part, rank in sent]
        held = x.shape[self.dim]
        if len(here) == 1:
            (start,) = here
            taken = x.narrow(self.dim, min(start, held), max(min(rows, held - start), 0))
        elif held:
            offset = self._mine([starts.get(rank, 0) for rank in range(count)], x)
            taken = x.index_select(self.dim, (torch.arange(rows, device=x.device) + offset).clamp(0, held - 1))
        else:
            taken = x
        missing = rows - taken.shape[self.dim]
        if missing:
            taken = aten.constant_pad_nd.default(taken, [*(0,) * (2 * (x.ndim - 1 - self.dim)), 0, missing])
        return ppermute(taken.contiguous(), self.axes, pairs)

    def _shards(self, rank: int) -> list[tuple[int, int]]:
        return [chunks(size, self.axes)[rank] for size in self.sizes]

    def _parts(self) -> list[list[_TakenRows]]:
        """What each rank's shard of the result is made of."""
        bounds = [chunks(size, self.axes) for size in self.sizes]
        found, groups = [], dict[tuple[int, int, int], list[tuple[int, int, int]]]()
        for rank, (start, stop) in enumerate(chunks(self.size, self.axes)):
            parts: list[tuple[tuple[int, int, int], _TakenRows]] = []
            seen = Counter[tuple[int, int]]()
            for number, first, last in self.intervals(start, stop) if start < stop else ():
                if number == FILL:
                    parts.append(((FILL, 0, 0), _TakenRows((FILL, 0), rank, 0, last - first)))
                    continue
                for sender, (low, high) in enumerate(bounds[number]):
                    begin, end = max(first, low), min(last, high)
                    if begin < end:
                        distance = (rank - sender) % len(bounds[number])
                        group = number, distance, seen[number, distance] if distance else 0
                        seen[number, distance] += 1
                        parts.append((group, _TakenRows((number, 0), sender, begin - low, end - begin)))
                        if distance:
                            groups.setdefault(group, []).append((sender, rank, end - begin))
            found.append(parts)
        permutes = _permutes(groups)
        return [
            [attrs.evolve(part, source=permutes.get(group, part.source)) for group, part in parts] for parts in found
        ]


def _permutes(groups: Mapping[tuple[int, int, int], Sequence[tuple[int, int, int]]]) -> dict[Any, tuple[int, int]]:
    """The operand and the number of the permute of groups of rows that are sent, from senders to receivers.

    Groups of one operand are sent together where no rank is in both: a flip is one permute.
    """
    joined: dict[int, list[tuple[set[int], set[int]]]] = {}
    found = {}
    for group, sent in sorted(groups.items(), key=lambda item: (-max(length for *_, length in item[1]), item[0])):
        known = joined.setdefault(group[0], [])
        senders, receivers = {sender for sender, *_ in sent}, {receiver for _, receiver, _ in sent}
        fits = (n for n, (s, r) in enumerate(known) if s.isdisjoint(senders) and r.isdisjoint(receivers))
        number = next(fits, len(known))
        if number == len(known):
            known.append((set(), set()))
        known[number][0].update(senders)
        known[number][1].update(receivers)
        found[group] = group[0], number + 1
    return found


def _rows(call: Call, dim: int, body: Callable[..., Any], replicated: int = 0) -> Row:
    """A strategy that shards the dim of all operands but the last `replicated` ones, and of all results."""
    count = len(call.operands) - replicated
    return Row((*(Shard(dim),) * count, *(Replicate(),) * replicated), (Shard(dim),) * len(call.results), body)


def _exchange(axes: Axes, call: Call, dim: int, size: int, intervals: Intervals) -> WindowExchange:
    return WindowExchange(dim, axes, tuple(meta.shape[dim] for meta in call.operands), size, intervals)


def _is_most(part: int, size: int) -> bool:
    return 0 < part and size <= 2 * part


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
    if len(places) > 1 and _is_most(places[-1] + 1 - places[0], size):
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
    spread = [size + (step - 1) * (size - 1) if i == dim else size for i, size in enumerate(rows.shape)]
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
    if places and _is_most(places[-1] + 1 - places[0], result.shape[_dim(call)]):
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
    if x.ndim and call.argument("step") == 1 and _is_most(source.shape[_dim(call)], x.shape[_dim(call)]):
        yield _rows(call, _dim(call), _slice_scatter_body)


# Pads, rolls, flips, joins


def _padded(before: int, size: int) -> Intervals:
    """`before` fill rows, which may be negative, `size` rows of an operand, and fill rows to the end."""

    def intervals(start: int, stop: int) -> list[Interval]:
        first, last = before, before + size
        pieces = [
            (FILL, start, min(stop, max(first, 0))),
            (0, max(start, first) - before, min(stop, last) - before),
            (FILL, max(start, last), stop),
        ]
        return [piece for piece in pieces if piece[1] < piece[2]]

    return intervals


def _pad(axes: Axes, call: Call, inner: Inner, dim: int, x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    place = 2 * (x.ndim - 1 - dim)
    whole, (result,) = call.operands[0].shape[dim], call.results
    intervals = _padded(pad[place], whole)
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
            if any(call.argument("pad")[number : number + 2]) and _is_most(*sizes):
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
    if _is_most(max(meta.shape[dim] for meta in call.operands), result.shape[dim]):
        yield _rows(call, dim, _cat_body)
