"""A picture as SVG: cells with the ranks that hold them, in the colour of the first rank."""

from __future__ import annotations

import colorsys
import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from spmd.core.pictures.grid import Grid, Panel, Track

_CHARACTER, _LINE = 6.8, 17
"""The width of a character and the height of a line of text, in pixels."""

_WIDTH, _HEIGHT = 480.0, 200.0
"""About how large a panel is, if its cells do not need more for their text."""

_PAGE = 960.0
"""Panels beside each other take no more than this."""

_FONT = "font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: 11px"


def grid_svg(grid: Grid) -> str:
    """The picture as an SVG element; text has the colour of the surrounding text."""
    wide = [chunk.length for chunk in grid.columns], [_needed(grid, number) for number in range(len(grid.columns))]
    high = [chunk.length for chunk in grid.rows], [26.0] * len(grid.rows)
    widths = _sizes(*wide, min(_WIDTH, max(240.0, 90.0 * len(grid.columns))))
    ratio = _total(grid.rows) / max(1, _total(grid.columns)) if grid.rows[0].label else 0.0
    heights = _sizes(*high, min(_HEIGHT, max(30.0 * len(grid.rows), sum(widths) * ratio)))
    margin = 8 + _CHARACTER * max(len(chunk.label) for chunk in grid.rows)
    head = _LINE * (1 + bool(grid.panels[0].title))
    size = margin + sum(widths) + 16, head + sum(heights) + 14
    per_line = max(1, min(len(grid.panels), int(_PAGE // size[0])))
    above = [grid.title, *grid.captions]
    notes = [line for note in grid.notes for line in textwrap.wrap(note, 90)]
    parts = list(_lines(above, 0.0, bold=1))
    top = _LINE * len(above) + 4.0
    for number, panel in enumerate(grid.panels):
        place = size[0] * (number % per_line), top + size[1] * (number // per_line)
        parts += _panel(grid, panel, place, (margin, float(head)), widths, heights)
    bottom = top + size[1] * -(-len(grid.panels) // per_line)
    parts += _lines(notes, bottom)
    longest = max(map(len, [*above, *notes]))
    width, height = max(size[0] * per_line, _CHARACTER * longest + 8), bottom + _LINE * len(notes) + 4
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(grid.title)}" '
        f'style="max-width: 100%; height: auto; {_FONT}" fill="currentColor">\n{body}\n</svg>'
    )


def _needed(grid: Grid, column: int) -> float:
    """The width that the texts of a column take."""
    cells = [row[column] for panel in grid.panels for row in panel.cells]
    texts = [grid.columns[column].label, *(cell.text for cell in cells if cell is not None)]
    return _CHARACTER * max(map(len, texts)) + 12


def _sizes(lengths: Sequence[int | None], needed: Sequence[float], total: float) -> list[float]:
    """Widths or heights in proportion to lengths, each at least what is needed; 24 for what is left out."""
    unit = total / max(1, sum(length or 0 for length in lengths))
    return [
        24.0 if length is None else max(unit * length, least) for length, least in zip(lengths, needed, strict=True)
    ]


def _total(chunks: Sequence[Track]) -> int:
    return sum(chunk.length or 0 for chunk in chunks)


def _lines(texts: Sequence[str], top: float, bold: int = 0) -> Iterator[str]:
    for number, text in enumerate(texts):
        weight = ' font-weight="bold"' if number < bold else ""
        yield f'<text x="2" y="{top + _LINE * number + 12:.1f}"{weight}>{escape(text)}</text>'


def _panel(
    grid: Grid,
    panel: Panel,
    place: tuple[float, float],
    corner: tuple[float, float],
    widths: Sequence[float],
    heights: Sequence[float],
) -> Iterator[str]:
    """One panel: its cells start at `corner` from its `place`; labels stand above and to the left."""
    left, top = place[0] + corner[0], place[1] + corner[1]
    if panel.title:
        yield f'<text x="{place[0] + 2:.1f}" y="{place[1] + 12:.1f}">{escape(panel.title)}</text>'
    y = top
    for row, (chunk, height) in enumerate(zip(grid.rows, heights, strict=True)):
        yield _text(chunk.label, left - 5, y + height / 2, "end")
        x = left
        for column, (head, width) in enumerate(zip(grid.columns, widths, strict=True)):
            if not row:
                yield _text(head.label, x + width / 2, top - 8, "middle")
            cell = panel.cells[row][column]
            if cell is None:
                yield _text("···", x + width / 2, y + height / 2, "middle")
            else:
                where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
                yield f'<rect {where} fill="{rank_colour(cell.first, grid.ranks)}" stroke="#555"/>'
                yield _text(cell.text, x + width / 2, y + height / 2, "middle", fill="#1a1a1a")
            x += width
        y += height


def _text(text: str, x: float, y: float, anchor: str, fill: str = "") -> str:
    colour = f' fill="{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}"{colour}>{escape(text)}</text>' if text else ""


def rank_colour(rank: int, ranks: int) -> str:
    """The colour of a rank: hues around the wheel, neighbours lighter and darker, all light enough for dark text."""
    red, green, blue = colorsys.hls_to_rgb(0.55 + 0.88 * rank / ranks, 0.74 if rank % 2 else 0.84, 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))
