"""`Picture`: what `spmd.visualize` returns; it shows itself in terminals, in notebooks and by rich."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from spmd.core.pictures.blocks import Blocks
from spmd.core.pictures.grid import Grid, make_grid
from spmd.core.pictures.svg import grid_svg
from spmd.core.pictures.text import grid_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST = (16, 8, 4)
"""How many rows and columns are shown at most: fewer in each of several panels, and where the text is too wide."""

_COLUMNS = 140
"""The most characters in a line of text."""


@attrs.frozen(repr=False)
class Picture:
    """Which rank holds which block: `str` is text, notebooks show SVG, and a rich console coloured text.

    Args:
        blocks: what is shown.
    """

    blocks: Blocks

    def titled(self, title: str) -> Picture:
        """The same picture with another title."""
        return Picture(attrs.evolve(self.blocks, title=title))

    def _grid(self, *, text: bool = False) -> Grid:
        """With as many rows and columns as there is room for."""
        for most in _MOST:
            grid = make_grid(self.blocks, most)
            crowded = most == _MOST[0] and len(grid.panels) > 1
            if not crowded and not (text and max(map(len, grid_text(grid).splitlines())) > _COLUMNS):
                break
        return grid

    def __str__(self) -> str:
        return grid_text(self._grid(text=True))

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
        from spmd.core.pictures.rich_text import grid_renderable  # rich is an extra, and calls this itself

        return grid_renderable(self._grid(text=True))

    @property
    def svg(self) -> str:
        """The picture as an SVG element; text has the colour of the surrounding text."""
        return grid_svg(self._grid())

    def _repr_html_(self) -> str:
        return f"<div>{self.svg}</div>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an SVG file, dark on white."""
        opened = self.svg.replace("<svg ", '<svg color="#1a1a1a" ', 1)
        head, rest = opened.split(">\n", 1)
        background = '<rect width="100%" height="100%" fill="white"/>'
        Path(path).write_text(f"{head}>\n{background}\n{rest}\n", encoding="utf-8")
