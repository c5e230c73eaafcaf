"""A picture for a rich console: the text, with cells in the colour of their first rank."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spmd.core.pictures.grid import Cell, Grid, Panel
from spmd.core.pictures.svg import rank_colour


def grid_renderable(grid: Grid) -> RenderableType:
    """The picture as tables of coloured cells; rich comes with the extra `report`."""
    above, notes = map(Text, (grid.title, *grid.captions)), map(Text, grid.notes)
    return Group(*above, *(_table(grid, panel) for panel in grid.panels), *notes)


def _table(grid: Grid, panel: Panel) -> Table:
    table = Table(title=panel.title or None, title_justify="left", show_lines=True, padding=0)
    table.add_column("")
    for chunk in grid.columns:
        table.add_column(Text(chunk.label), justify="center")
    for chunk, cells in zip(grid.rows, panel.cells, strict=True):
        table.add_row(Text(chunk.label), *(_cell(cell, grid.ranks) for cell in cells))
    return table


def _cell(cell: Cell | None, ranks: int) -> Text:
    return Text("...") if cell is None else Text(f" {cell.text} ", style=f"black on {rank_colour(cell.first, ranks)}")
