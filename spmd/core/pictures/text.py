"""A picture as text of a fixed width."""

from __future__ import annotations

from spmd.core.pictures.grid import Grid, Panel

_HIDDEN = "..."


def grid_text(grid: Grid) -> str:
    """The picture as lines of text: title, captions, a table for each panel, notes."""
    tables = [line for panel in grid.panels for line in _panel(grid, panel)]
    return "\n".join([grid.title, *grid.captions, *tables, *grid.notes])


def _panel(grid: Grid, panel: Panel) -> list[str]:
    texts = [[_HIDDEN if cell is None else cell.text for cell in row] for row in panel.cells]
    head = [chunk.label for chunk in grid.columns]
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    margin = max(len(chunk.label) for chunk in grid.rows)
    join = lambda left, fill, middle, right: left + middle.join(fill * (w + 2) for w in widths) + right  # noqa: E731
    line = lambda cells: "│".join(f" {text:^{width}} " for text, width in zip(cells, widths, strict=True))  # noqa: E731
    indent = " " * margin
    lines = [panel.title] if panel.title else []
    if any(head):
        lines.append(f"{indent}  {'  '.join(f' {text:^{w}}' for text, w in zip(head, widths, strict=True))}".rstrip())
    lines.append(f"{indent} {join('┌', '─', '┬', '┐')}")
    for number, (chunk, cells) in enumerate(zip(grid.rows, texts, strict=True)):
        if number:
            lines.append(f"{indent} {join('├', '─', '┼', '┤')}")
        lines.append(f"{chunk.label:>{margin}} │{line(cells)}│")
    return [*lines, f"{indent} {join('└', '─', '┴', '┘')}"]
