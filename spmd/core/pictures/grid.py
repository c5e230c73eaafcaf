"""A picture as rows and columns of cells: the dims that split a tensor, and a panel for each index of further ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import attrs

from spmd.core.pictures.blocks import Blocks, Dim, rank_text

PANELS = 4
"""The most panels that are shown."""

_WHOLE = Dim("", (), ((0, 1),), ("",))
"""The rows of a tensor that has columns only."""


@attrs.frozen
class Cell:
    """One block: its ranks as text, and the position of the first rank in the mesh, which is its colour."""

    text: str
    first: int


@attrs.frozen
class Track:
    """One row or column: its label, and its length; None where several are left out."""

    label: str
    length: int | None


@attrs.frozen
class Panel:
    """Cells by row and column; None where rows or columns are left out."""

    title: str
    cells: tuple[tuple[Cell | None, ...], ...]


@attrs.frozen
class Grid:
    """A picture.

    Args:
        title: what is shown.
        captions: what rows and columns are.
        rows, columns: their labels and lengths.
        panels: one, or one for each index of the dims that are neither rows nor columns, but split.
        notes: what the cells do not say.
        ranks: how many ranks there are.
    """

    title: str
    captions: tuple[str, ...]
    rows: tuple[Track, ...]
    columns: tuple[Track, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    ranks: int


def make_grid(blocks: Blocks, most: int) -> Grid:
    """The picture of blocks.

    Rows and columns are the last two dims that are split, and others where there are fewer.

    Args:
        blocks: the blocks.
        most: the most rows and columns; of more, some in the middle are left out.
    """
    shown = _shown(blocks)
    row, column = ([None] * (2 - len(shown)) + shown)[-2:]
    further = [number for number, dim in enumerate(blocks.dims) if dim.axes and number not in shown]
    rows, columns = (_numbers(_dim(blocks, number), most) for number in (row, column))
    panels = []
    for indices in itertools.islice(itertools.product(*(blocks.dims[n].filled for n in further)), PANELS):
        fixed: dict[int | None, int] = dict(zip(further, indices, strict=True))
        titles = (f"{blocks.dims[n].text}: {blocks.dims[n].labels[i]}" for n, i in zip(further, indices, strict=True))
        cells = tuple(
            tuple(None if r is None or c is None else _cell(blocks, {**fixed, row: r, column: c}) for c in columns)
            for r in rows
        )
        panels.append(Panel(", ".join(titles), cells))
    captions = [f"{what}: {blocks.dims[n].text}" for what, n in (("rows", row), ("columns", column)) if n is not None]
    return Grid(
        blocks.title,
        tuple(captions),
        tuple(_chunk(_dim(blocks, row), number) for number in rows),
        tuple(_chunk(_dim(blocks, column), number) for number in columns),
        tuple(panels),
        tuple(_notes(blocks, shown, math.prod(len(blocks.dims[n].filled) for n in further))),
        len(blocks.ranks),
    )


def _shown(blocks: Blocks) -> list[int]:
    """The numbers of up to two dims that are drawn: of those that are split the last two, then the last others."""
    split = [number for number, dim in enumerate(blocks.dims) if dim.axes]
    others = [number for number, dim in enumerate(blocks.dims) if not dim.axes]
    chosen = split[-2:]
    return sorted([*chosen, *others[len(others) - min(len(others), 2 - len(chosen)) :]])


def _dim(blocks: Blocks, number: int | None) -> Dim:
    return _WHOLE if number is None else blocks.dims[number]


def _numbers(dim: Dim, most: int) -> tuple[int | None, ...]:
    """The chunks that are shown; None between the first and the last of many."""
    if len(dim.filled) <= most:
        return dim.filled
    last = most // 4
    return (*dim.filled[: most - last - 1], None, *dim.filled[-last:])


def _chunk(dim: Dim, number: int | None) -> Track:
    if number is None:
        return Track("...", None)
    start, stop = dim.bounds[number]
    return Track(dim.labels[number], stop - start)


def _cell(blocks: Blocks, chosen: dict[int | None, int]) -> Cell:
    chunks = [chosen.get(number, 0) for number in range(len(blocks.dims))]
    return Cell(blocks.holders_text(chunks), blocks.holders(chunks)[0][0])


def _notes(blocks: Blocks, shown: Sequence[int], panels: int) -> Iterator[str]:
    whole = [str(number) for number, dim in enumerate(blocks.dims) if not dim.axes and number not in shown]
    if whole:
        yield f"not split, in every block as a whole: {'dims' if len(whole) > 1 else 'dim'} {', '.join(whole)}"
    if any(dim.bounds[-1][1] == 0 for dim in blocks.dims):
        yield "the tensor has no elements"
    if blocks.replicated:
        yield f"replicated over {', '.join(blocks.replicated)}: {blocks.copies} copies of every block"
    if blocks.partial:
        over = ", ".join(blocks.partial)
        yield f"partial over {over}: a block is the {blocks.reduction} of what {blocks.terms} ranks hold"
    if blocks.empty:
        yield f"empty shards: {'rank' if len(blocks.empty) == 1 else 'ranks'} {rank_text(blocks.empty, 60)}"
    if panels > PANELS:
        yield f"the first {PANELS} of {panels} panels"
