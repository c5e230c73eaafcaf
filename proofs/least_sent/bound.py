"""A lower bound of what ranks send, from the dependence of results on elements that other ranks hold.

What rank i must receive is at least the rank of d(its results)/d(elements that it does not hold), for its results are a
function of what it receives and holds. What rank j must send is at least the rank of d(results elsewhere)/d(elements
that only j holds). Parts of a pending sum are elements of their own, and numbers of a narrower dtype than float64 count
with their bytes.

Three things make the bound higher, and keep it one:

- Numbers that share no element, not even one that the rank holds, are independent: each such block counts with the
  point that is best for it, as one point has all blocks at theirs.
- Of numbers that change with one element each, and not with those of the others, every combination occurs: at one point
  of what the rank holds, each is a choice of its own, which needs a number of its own unless choices are packed into
  the bits of one, as no plan does. This sees what derivatives do not: signs, steps, and which of many is taken.
- A number of a result that is not floating counts as one that is sent, if it depends on elements elsewhere: a position
  is not computed from the values that are sent for other results, unless all elements are. This is a declaration.

A plan that sends less than the bound shows that it is none: the sweep looks for such a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from proofs.least_sent.dependence import Dependence
from spmd.core.shards import split
from spmd.core.spec import DTensorSpec

NUMBER = 8
"""The bytes of a number: all is computed in float64."""
_ROUNDING = 1e-6
"""Singular values below this part of the largest one count as zero."""
_ZERO = 1e-8
"""Singular values below it count as zero: differences are not more exact."""


@attrs.frozen
class LeastSent:
    """A lower bound of what ranks send, in numbers.

    Args:
        sent: by one rank, to give others what only it holds.
        received: by a rank, on average.
        merged: the messages from each rank that merge numbers of replicated results, those that depend on what every
            rank holds that holds something: one for each block, as an element may serve several numbers.
        given: these numbers, which all ranks get.
        gathered: what a rank receives, on average, where it gets all that it does not hold.
        ranks: the number of ranks.
        holding: the number of ranks that hold something which no other does.
        is_known: whether a result depends on an element: of others, as of constants, nothing is known.
    """

    sent: float
    received: float
    merged: float
    given: float
    gathered: float
    ranks: int
    holding: int
    is_known: bool

    @property
    def numbers(self) -> float:
        """The numbers of the rank that sends most.

        To merge a number takes a message less than there are ranks that hold a part of it, and to give it to all as
        many as there are others: on n ranks, 2(n - 1)/n from each on average, as a ring sends it.
        """
        around = (max(self.holding - 1, 0) * self.merged + (self.ranks - 1) * self.given) / self.ranks
        return max(self.received, self.sent, min(self.gathered, around))


@attrs.frozen(eq=False)
class _Element:
    """An element of an operand, or of one rank's part of it: its column, and who holds it."""

    column: int
    holders: frozenset[int]


def least_sent(
    found: Dependence, specs: Sequence[DTensorSpec], results: Sequence[DTensorSpec], choice: float = 1.0
) -> LeastSent:
    """Bound from below what ranks send to compute a function.

    Args:
        found: the dependence of its results on its operands.
        specs: the specs of the operands; those that are not floating must be replicated.
        results: the specs of the results, with nothing pending.
        choice: the size of the smallest value of the program, in numbers.
    """
    ranks = specs[0].mesh.size if specs else results[0].mesh.size
    elements = list(_elements(found, specs))
    blocks = _Blocks(found, choice)
    rows = _holders(results)
    sent, received = [], []
    for rank in range(ranks):
        lacks = sorted({element.column for element in elements if rank not in element.holders})
        mine = torch.tensor([rank in holders for holders in rows], dtype=torch.bool)
        received.append(min(blocks.touched(mine, lacks), blocks.least(mine, lacks) + blocks.positions(mine, lacks)))
        alone = [element.column for element in elements if element.holders == {rank}]
        elsewhere = torch.tensor([holders != {rank} for holders in rows], dtype=torch.bool)
        sent.append(blocks.least(elsewhere, alone))
    owned = {rank: [e.column for e in elements if e.holders == {rank}] for rank in range(ranks)}
    owned = {rank: columns for rank, columns in owned.items() if columns}
    merged = given = 0.0
    if owned and len(owned) > 1 and all(spec.is_replicated for spec in results):
        touched = torch.stack([blocks.depends[:, columns].any(1) for columns in owned.values()]).all(0)
        every = sorted({column for columns in owned.values() for column in columns})
        parts = [blocks.least(rows, every) + blocks.positions(rows, every) for rows in blocks.apart(touched)]
        merged, given = sum(min(1.0, part) for part in parts), sum(parts)
    gathered = sum(ranks - len(element.holders) for element in elements) / ranks
    known = bool(blocks.depends.any())
    return LeastSent(max(sent), sum(received) / ranks, merged, given, gathered, ranks, len(owned), known)


class _Blocks:
    """The numbers of results and the elements of operands, in blocks that share nothing."""

    def __init__(self, found: Dependence, choice: float) -> None:
        self.found, self.choice = found, choice
        self.depends = found.depends
        self._rows = _components(self.depends)

    def touched(self, rows: torch.Tensor, columns: Sequence[int]) -> int:
        """The number of the columns on which some of the rows depend."""
        return int(self.depends[rows][:, list(columns)].any(0).sum())

    def positions(self, rows: torch.Tensor, columns: Sequence[int]) -> float:
        """The count of numbers that are not floating among some rows, where they depend on some columns."""
        chosen = rows & ~self.found.is_floating & self.depends[:, list(columns)].any(1)
        return float(self.found.sizes[chosen].sum()) / NUMBER

    def least(self, rows: torch.Tensor, columns: Sequence[int]) -> float:
        """A lower bound of the numbers that tell some rows all that they need of some columns."""
        if not columns:
            return 0
        depends = self.depends[:, list(columns)]
        needed = rows & self.found.is_floating & depends.any(1)
        return sum(self._block(columns, group.nonzero()[:, 0]) for group in self.apart(needed))

    def apart(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Some rows, block by block."""
        for block in self._rows[rows].unique().tolist():
            yield rows & (self._rows == block)

    def _block(self, columns: Sequence[int], rows: torch.Tensor) -> float:
        inside = torch.tensor(columns)[self.depends[rows][:, list(columns)].any(0)]
        sizes = self.found.sizes[rows] / NUMBER
        most = min(float(sizes.sum()), len(inside))
        best = max(_independent_size(slope[rows][:, inside], sizes) for slope in self.found.slopes)
        if best == most:
            return best
        depends = self.depends[rows][:, inside]
        choices = max(_independent(change[rows][:, inside], depends) for change in self.found.changes)
        return max(best, self.choice * choices)


def _components(depends: torch.Tensor) -> torch.Tensor:
    """The number of each row's block: rows that have a column in common are in one."""
    labels = torch.arange(len(depends))
    while True:
        least = torch.where(depends, labels[:, None], len(depends)).amin(0) if len(depends) else labels
        joined = torch.where(depends, least[None], len(depends)).amin(1) if depends.shape[1] else labels
        joined = torch.minimum(joined, labels)
        if torch.equal(joined, labels):
            return labels
        labels = joined


def _independent(changes: torch.Tensor, depends: torch.Tensor) -> int:
    """The size of a set of rows, each with a column that changes it and no other of the set; found greedily."""
    weights = [1 << row for row in range(len(depends))]
    changed, dependent = (
        [sum(w for w, bit in zip(weights, column, strict=True) if bit) for column in matrix.T.tolist()]
        for matrix in (changes, depends)
    )
    chosen = excluded = count = 0
    for column in sorted(range(len(dependent)), key=lambda n: dependent[n].bit_count()):
        free = changed[column] & ~excluded
        if free and not dependent[column] & chosen:
            chosen |= free & -free
            excluded |= dependent[column]
            count += 1
    return count


def _elements(found: Dependence, specs: Sequence[DTensorSpec]) -> Iterator[_Element]:
    """The elements that ranks hold: a pending sum has one for each rank that has a part."""
    columns = {key: column for column, key in enumerate(found.keys)}
    for number, spec in enumerate(specs):
        if (number, 0) not in columns:
            continue
        for index, holders in _held(spec).items():
            for group in [[rank] for rank in holders] if spec.partial else [holders]:
                yield _Element(columns[number, index], frozenset(group))


def _held(spec: DTensorSpec) -> dict[int, list[int]]:
    """The ranks that hold each element, or a part of it."""
    places = torch.arange(spec.meta.numel).reshape(spec.meta.shape)
    held: dict[int, list[int]] = {}
    for rank, shard in enumerate(split([places] * _parts(spec), spec)):
        for index in shard.flatten().tolist():
            held.setdefault(index, []).append(rank)
    return held


def _parts(spec: DTensorSpec) -> int:
    return spec.mesh.axis_size([axis for axis, _ in spec.partial]) if spec.partial else 1


def _holders(specs: Sequence[DTensorSpec]) -> list[frozenset[int]]:
    """The ranks that hold each number of the results."""
    return [frozenset(ranks) for spec in specs for _, ranks in sorted(_held(spec).items())]


def _independent_size(matrix: torch.Tensor, sizes: torch.Tensor) -> float:
    """The size of linearly independent rows, the largest first."""
    found, rank = 0.0, 0
    for size in sizes.unique().flip(0).tolist():
        before, rank = rank, _rank(matrix[sizes >= size])
        found += size * (rank - before)
    return found


def _rank(matrix: torch.Tensor) -> int:
    if not matrix.numel() or not bool(matrix.any()):
        return 0
    values = torch.linalg.svdvals(matrix)
    return int((values > max(_ROUNDING * float(values[0]), _ZERO)).sum())
