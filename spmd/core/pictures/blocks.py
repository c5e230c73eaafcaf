"""Which ranks hold which block of a tensor, in plain data: what a picture shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import attrs

LONGEST = 16
"""The most characters in which the ranks of one block are listed; of more ranks, the first one and their number."""


@attrs.frozen
class Dim:
    """One dim of a tensor, or one axis of a mesh, and how it is split.

    Args:
        text: what it is: `dim 0 (5) by data`.
        axes: the mesh axes that split it, major first.
        bounds: start and stop of every chunk, in the order of the flattened index along `axes`.
        labels: what stands beside each chunk: `0:3`.
    """

    text: str
    axes: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    labels: tuple[str, ...]

    @property
    def filled(self) -> tuple[int, ...]:
        """The numbers of the chunks that are not empty; all of them if all are."""
        found = tuple(number for number, (start, stop) in enumerate(self.bounds) if stop > start)
        return found or tuple(range(len(self.bounds)))


@attrs.frozen
class Blocks:
    """The blocks of a tensor over a mesh.

    Args:
        title: what is shown, in one line.
        axes: the sizes of the mesh axes, in mesh order.
        ranks: the number of each rank, in rank order.
        dims: the dims of the tensor.
        partial: the mesh axes over which a reduction is pending, in mesh order.
        reduction: the name of that reduction; "" if none is pending.
    """

    title: str
    axes: Mapping[str, int]
    ranks: Sequence[int]
    dims: tuple[Dim, ...]
    partial: tuple[str, ...] = ()
    reduction: str = ""

    @cached_property
    def replicated(self) -> tuple[str, ...]:
        """The mesh axes over which blocks are replicated."""
        used = {axis for dim in self.dims for axis in dim.axes} | set(self.partial)
        return tuple(axis for axis in self.axes if axis not in used)

    @property
    def copies(self) -> int:
        """How many times each block is held."""
        return math.prod(self.axes[axis] for axis in self.replicated)

    @property
    def terms(self) -> int:
        """How many ranks hold what is still to be reduced to one copy of a block."""
        return math.prod(self.axes[axis] for axis in self.partial)

    def holders(self, chunks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The positions of the ranks that hold a block: one tuple for each copy, of the ranks that are reduced to it.

        Args:
            chunks: the number of the block's chunk in each dim.
        """
        place: dict[str, int] = {}
        for dim, number in zip(self.dims, chunks, strict=True):
            for axis in reversed(dim.axes):
                number, place[axis] = divmod(number, self.axes[axis])
        return tuple(
            tuple(sorted(self._rank({**place, **copy, **term}) for term in self._places(self.partial)))
            for copy in self._places(self.replicated)
        )

    def _places(self, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        for indices in itertools.product(*(range(self.axes[axis]) for axis in axes)):
            yield dict(zip(axes, indices, strict=True))

    def _rank(self, place: Mapping[str, int]) -> int:
        rank = 0
        for axis, size in self.axes.items():
            rank = rank * size + place[axis]
        return rank

    def holders_text(self, chunks: Sequence[int], longest: int = LONGEST) -> str:
        """The ranks of a block as text: `0, 4`, or `sum of 0-3`; shortened if it is longer than `longest`."""
        copies = self.holders(chunks)
        if not self.partial:
            return rank_text([self.ranks[rank] for (rank,) in copies], longest)
        texts = [f"{self.reduction} of {rank_text([self.ranks[rank] for rank in copy], longest)}" for copy in copies]
        text = "; ".join(texts)
        return text if len(text) <= 2 * longest else f"{texts[0]}, {len(texts)} times"

    @property
    def empty(self) -> tuple[int, ...]:
        """The numbers of the ranks that hold nothing because a dim has fewer chunks than ranks, in rank order."""
        hollow = [sorted(set(range(len(dim.bounds))) - set(dim.filled)) for dim in self.dims]
        found: set[int] = set()
        for position, numbers in enumerate(hollow):
            every = [range(len(dim.bounds)) for dim in self.dims]
            every[position] = numbers  # type: ignore[call-overload]  # numbers of chunks, as a range is
            found |= {rank for chunks in itertools.product(*every) for copy in self.holders(chunks) for rank in copy}
        return tuple(self.ranks[rank] for rank in sorted(found))


def rank_text(ranks: Sequence[int], longest: int) -> str:
    """Numbers of ranks as text: consecutive ones as a range.

    >>> rank_text([0, 1, 2, 3, 8], 16), rank_text([0, 8, 16, 24, 32, 40], 16)
    ('0-3, 8', '0, ... (6 ranks)')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ', '}{run[-1]}" for run in runs]
    text = ", ".join(parts)
    return text if len(text) <= longest else f"{parts[0]}, ... ({len(ranks)} ranks)"
