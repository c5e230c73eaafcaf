"""The exchange of rows of sharded dims: each rank's window of operands' rows, in as few permutes as there are parts.

Each interval of a window is cut where another rank's shard begins, and the parts of all ranks at one distance are sent
in one permute; distances share permutes where they can. What is sent is what changes its owner.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives import ppermute
from spmd.rules.ops.by_rank import by_rank, chunks
from spmd.rules.ops.one_dim import padded, resized
from spmd.rules.rule import Axes

FILL = -1
"""The operand number of rows that have a fill value."""

Interval: TypeAlias = tuple[int, int, int]
"""Rows of an operand: its number, the first row, and the row after the last."""

Intervals: TypeAlias = Callable[[int, int], list[Interval]]
"""The intervals that the rows from `start` to `stop` of a result are, in order."""

_Piece: TypeAlias = tuple[int, int]
"""A tensor that a rank has after the exchange: an operand's number and 0, or 0 and the number of a permute."""

_Group: TypeAlias = tuple[int, int, int]
"""Rows of an operand that go the same distance: its number, the distance, and which of those of each rank."""

_Route: TypeAlias = tuple[int, int]
"""The rank that sends, and the one that receives."""

_Sent: TypeAlias = tuple[_Group, _Route]
"""The rows of a group that one rank sends another."""


@attrs.frozen
class _TakenRows:
    """Rows that a rank takes from what it has after the exchange.

    Args:
        operand: its number, or `FILL`.
        sender: the rank that has them.
        start: the first row: of the sender's shard.
        length: the number of rows.
        permute: the number of the permute that brings them, from 1; 0 for rows of the rank itself.
    """

    operand: int
    sender: int
    start: int
    length: int
    permute: int = 0

    @property
    def place(self) -> tuple[_Piece, int, int]:
        """Where they are after the exchange, and their number: sent ones are the first rows of what is received."""
        return ((0, self.permute), 0, self.length) if self.permute else ((self.operand, 0), self.start, self.length)


@attrs.frozen
class WindowExchange:
    """An exchange of rows of operands whose dim `dim` is sharded over `axes`.

    Args:
        dim: the dim.
        axes: the mesh axes.
        sizes: the global length of the dim of each operand.
        windows: what each rank gets.
    """

    dim: int
    axes: Axes
    sizes: tuple[int, ...]
    windows: Sequence[Sequence[Interval]]

    def __call__(self, operands: Sequence[Tensor], length: int, fill: Any = 0) -> Tensor:
        """This rank's window, with `length` rows, from its shards of the operands."""
        dim, every = self.dim, self._parts()
        alike = [
            rank
            for rank, parts in enumerate(every)
            if sum(part.length for part in parts) == length
            and all(stop - start == x.shape[dim] for x, (start, stop) in zip(operands, self._shards(rank), strict=True))
        ]
        pieces = {(number, 0): x for number, x in enumerate(operands)}
        like = operands[0]
        sent: dict[int, list[tuple[int, _TakenRows]]] = {}
        for rank, parts in enumerate(every):
            for part in parts:
                if part.permute:
                    sent.setdefault(part.permute, []).append((rank, part))
        for number, taken in sorted(sent.items()):
            pieces[0, number] = self._send(operands, taken, alike)
        if any(part.operand == FILL for parts in every for part in parts):
            rows = max(part.length for parts in every for part in parts if part.operand == FILL)
            pieces[FILL, 0] = like.new_full(resized(like.shape, dim, rows), fill)
        layouts = {tuple(part.place for part in every[rank]) for rank in alike}
        if len(layouts) == 1:
            found = [pieces[piece].narrow(dim, start, rows) for piece, start, rows in layouts.pop() if rows]
            return torch.cat(found, dim) if len(found) > 1 else [*found, like.narrow(dim, 0, 0)][0]
        return self._selected(pieces, every, length)

    def _selected(self, pieces: dict[_Piece, Tensor], every: list[list[_TakenRows]], length: int) -> Tensor:
        """The rows where ranks with equal shapes take different ones: looked up in all that they have."""
        dim = self.dim
        firsts, first = {}, 0
        for piece, x in pieces.items():
            firsts[piece], first = first, first + x.shape[dim]
        place = torch.arange(length, device=next(iter(pieces.values())).device)
        found = torch.zeros_like(place)
        for number in range(max(map(len, every))):
            begins, offsets = [], []
            for parts in every:
                begin = sum(part.length for part in parts[:number])
                begins.append(begin if number < len(parts) else length)
                piece, start, _ = parts[number].place if number < len(parts) else ((0, 0), 0, 0)
                offsets.append(firsts.get(piece, 0) + start - begin)
            found = torch.where(place >= self._mine(begins, place), place + self._mine(offsets, place), found)
        return torch.cat(list(pieces.values()), dim).index_select(dim, found)

    def _mine(self, values: list[int], like: Tensor) -> Tensor | int:
        return by_rank(values, self.axes, like.device)

    def _send(self, operands: Sequence[Tensor], sent: Sequence[tuple[int, _TakenRows]], alike: Sequence[int]) -> Tensor:
        """What a permute brings to this rank, of rows that each receiver takes."""
        numbers = sorted({part.operand for _, part in sent})
        x = torch.cat([operands[number] for number in numbers], self.dim) if len(numbers) > 1 else operands[numbers[0]]
        rows = max(part.length for _, part in sent)
        starts = {}
        for _, part in sent:
            shards = self._shards(part.sender)
            before = (shards[number] for number in numbers if number < part.operand)
            starts[part.sender] = part.start + sum(stop - start for start, stop in before)
        here = {starts[rank] for rank in alike if rank in starts} or {0}
        held = x.shape[self.dim]
        if len(here) == 1:
            (start,) = here
            taken = x.narrow(self.dim, min(start, held), max(min(rows, held - start), 0))
        elif held:
            offset = self._mine([starts.get(rank, 0) for rank in range(len(self.windows))], x)
            taken = x.index_select(self.dim, (torch.arange(rows, device=x.device) + offset).clamp(0, held - 1))
        else:
            taken = x
        taken = padded(taken, self.dim, 0, rows - taken.shape[self.dim])
        return ppermute(taken.contiguous(), self.axes, [(part.sender, rank) for rank, part in sent])

    def _shards(self, rank: int) -> list[tuple[int, int]]:
        return [chunks(size, self.axes)[rank] for size in self.sizes]

    def _parts(self) -> list[list[_TakenRows]]:
        """What each rank's window is made of."""
        bounds = [chunks(size, self.axes) for size in self.sizes]
        found, groups = [], dict[_Group, dict[_Route, int]]()
        for rank, intervals in enumerate(self.windows):
            parts: list[tuple[_Group, _TakenRows]] = []
            seen = Counter[tuple[int, int]]()
            for number, first, last in intervals:
                if number == FILL:
                    parts.append(((FILL, 0, 0), _TakenRows(FILL, rank, 0, last - first)))
                    continue
                holds = bisect_right(bounds[number], first, key=itemgetter(1))
                for sender in range(holds, bisect_left(bounds[number], last, key=itemgetter(0))):
                    low, high = bounds[number][sender]
                    begin, end = max(first, low), min(last, high)
                    distance = (rank - sender) % len(bounds[number])
                    group = number, distance, seen[number, distance] if distance else 0
                    seen[number, distance] += 1
                    parts.append((group, _TakenRows(number, sender, begin - low, end - begin)))
                    if distance:
                        groups.setdefault(group, {})[sender, rank] = end - begin
            found.append(parts)
        permutes = _permutes(groups)
        return [
            [attrs.evolve(part, permute=permutes.get((group, (part.sender, rank)), 0)) for group, part in parts]
            for rank, parts in enumerate(found)
        ]


def _permutes(groups: Mapping[_Group, Mapping[_Route, int]]) -> dict[_Sent, int]:
    """The numbers of the permutes, from 1, that send groups of rows, of some lengths, from senders to receivers.

    Groups are sent together where no rank is in both: a flip is one permute. A group that fits nowhere shares the
    permutes of about as many rows, where each of its ranks is missing in one of them.
    """
    permutes: list[list[_Sent]] = []
    most: list[int] = []
    for group, lengths in sorted(groups.items(), key=lambda item: (-max(item[1].values()), item[0])):
        sent, length = [(group, route) for route in lengths], max(lengths.values())
        near = [number for number, rows in enumerate(most) if rows <= 2 * length]
        of_operand = (n for n, known in enumerate(permutes) if {source[0] for source, _ in known} == {group[0]})
        candidates = sorted({*near, *of_operand})
        fits = (n for n in candidates if _ends(permutes[n]).keys().isdisjoint(_ends(sent)))
        if (number := next(fits, None)) is not None:
            permutes[number] += sent
        elif (shared := _shared([permutes[number] for number in near], sent)) is not None:
            for number, rows in zip(near, shared, strict=True):
                permutes[number] = rows
        else:
            permutes.append(sent)
            most.append(length)
    return {rows: number for number, permute in enumerate(permutes, 1) for rows in permute}


def _ends(sent: Iterable[_Sent]) -> dict[tuple[str, int], _Sent]:
    """The rows that a permute sends, by sender and by receiver."""
    return {(role, rank): rows for rows in sent for role, rank in zip(("from", "to"), rows[1], strict=True)}


def _shared(permutes: Sequence[Sequence[_Sent]], added: Sequence[_Sent]) -> list[list[_Sent]] | None:
    """The permutes with more rows distributed among them; None if a rank sends, or gets, more parts than there are.

    It is the colouring of a bipartite graph's edges (König, 1916): where a sender and a receiver are free in different
    permutes only, the rows on the path from the receiver that alternates between these change places.
    """
    ends = [_ends(sent) for sent in permutes]
    for rows in added:
        start, end = _ends([rows])
        free = [[number for number, known in enumerate(ends) if rank not in known] for rank in (start, end)]
        if not all(free):
            return None
        one, two = next(((number, number) for number in free[0] if number in free[1]), (free[0][0], free[1][0]))
        path, at, number = [], end, one
        while at in ends[number]:
            path.append((ends[number][at], number))
            (at,) = _ends([path[-1][0]]).keys() - {at}
            number = one + two - number
        for moved, number in path:
            for rank in _ends([moved]):
                del ends[number][rank]
        for moved, number in [*path, (rows, two)]:
            ends[one + two - number].update(_ends([moved]))
    return [list(dict.fromkeys(known.values())) for known in ends]


def windows(size: int, axes: Axes, intervals: Intervals) -> list[list[Interval]]:
    """The intervals that each rank's shard of a result is, whose sharded dim is of length `size`."""
    return [intervals(start, stop) if start < stop else [] for start, stop in chunks(size, axes)]


def between_fills(before: int, size: int) -> Intervals:
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


FEW = 8
"""The most rows, and the most pieces of one tensor, that are exchanged wherever they are, of a dim with more rows.

Where there are no more, exchanges save nothing, and more strategies make the search slow, or inexact.
"""


def is_near(part: int, size: int) -> bool:
    """Test for a part of a dim that is most of it, or a few rows."""
    return 0 < part and (size <= 2 * part or part <= FEW < size)
