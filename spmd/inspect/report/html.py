"""Renders a report as a self-contained HTML page: no scripts, and no external styles or images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from spmd.core.quantity import size_text, time_text
from spmd.inspect.report.figures import Report, Span

_WIDTH, _LANE = 1000.0, 22
_COLOURS = {
    "compute": "#4c78a8",
    "all_reduce": "#e45756",
    "all_gather": "#f58518",
    "reduce_scatter": "#54a24b",
    "all_to_all": "#b279a2",
    "permute": "#9d755d",
}
"""The lanes of the timeline, with their colours."""

_STYLE = """
.spmd-plan { font: 13px/1.4 system-ui, sans-serif; max-width: 72rem; }
.spmd-plan table { border-collapse: collapse; margin: 0 0 1rem; }
.spmd-plan th, .spmd-plan td { text-align: left; padding: 2px 10px; border-bottom: 1px solid #8884; }
.spmd-plan .number { text-align: right; white-space: nowrap; }
.spmd-plan code { font-size: 12px; }
.spmd-plan svg { width: 100%; height: auto; }
"""


def render_page(report: Report) -> str:
    """Render a report as a complete HTML document."""
    title = escape(f"Plan on {report.summary['mesh']}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title></head>\n'
        f"<body>\n{render_fragment(report)}\n</body>\n</html>\n"
    )


def render_fragment(report: Report) -> str:
    """Render a report as an HTML fragment for a page or a notebook's cell."""
    sections = (
        ("Plan", _summary(report)),
        ("Timeline", _timeline(report)),
        *([("Layers", _layers(report))] if report.layers else []),
        ("Lines", _lines(report)),
        ("Collectives", _causes(report)),
    )
    body = "\n".join(f"<section><h3>{title}</h3>\n{content}</section>" for title, content in sections)
    return f'<div class="spmd-plan">\n<style>{_STYLE}</style>\n{body}\n</div>'


def _summary(report: Report) -> str:
    rows = [*report.summary.items(), *(("runs replicated, without a rule", text) for text in report.fallbacks)]
    return _table((), ((name, text) for name, text in rows), numbers=())


def _layers(report: Report) -> str:
    rows = (
        (
            layer.place,
            layer.layers,
            str(layer.operations),
            time_text(layer.compute),
            time_text(layer.communication),
            size_text(layer.bytes),
            layer.otherwise,
        )
        for layer in report.layers
    )
    head = ("lines", "layers", "operations", "compute", "communication", "sent", "otherwise than most")
    return _table(head, rows, numbers=(2, 3, 4, 5))


def _lines(report: Report) -> str:
    rows = (
        (
            line.place or "no line",
            line.code,
            str(line.operations),
            time_text(line.compute),
            time_text(line.communication),
            size_text(line.bytes),
        )
        for line in report.lines
    )
    return _table(("line", "code", "operations", "compute", "communication", "sent"), rows, numbers=(2, 3, 4, 5))


def _causes(report: Report) -> str:
    rows = (
        (c.kind, ", ".join(c.axes), str(c.count), f"{c.bytes:,.0f}", time_text(c.seconds), c.cause, c.place)
        for c in report.causes
    )
    return _table(("kind", "axes", "count", "bytes", "time", "cause", "line"), rows, numbers=(2, 3, 4))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], numbers: tuple[int, ...]) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        kind = lambda column: ' class="number"' if column in numbers else ""  # noqa: E731
        return "".join(f"<{tag}{kind(n)}>{escape(text)}</{tag}>" for n, text in enumerate(row))

    header = f"<thead><tr>{cells(head, 'th')}</tr></thead>\n" if head else ""
    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table>\n{header}<tbody>\n{body}\n</tbody>\n</table>\n"


def _timeline(report: Report) -> str:
    """Bars in order of predicted time, one lane for compute and one for each kind of collective that there is."""
    lanes = [kind for kind in _COLOURS if any(span.kind == kind for span in report.spans)]
    height = _LANE * max(1, len(lanes)) + 4
    bars = "\n".join(_bars(report.spans, lanes, report.seconds))
    names = " ".join(f'<span style="color:{_COLOURS[lane]}">&#9632;</span> {escape(lane)}' for lane in lanes)
    drawing = f'<svg viewBox="0 0 {_WIDTH:.0f} {height}" role="img" aria-label="timeline">\n{bars}\n</svg>'
    return f"<p>{names}: {time_text(report.seconds)} from left to right</p>\n{drawing}\n"


def _bars(spans: Iterable[Span], lanes: list[str], total: float) -> Iterator[str]:
    scale = _WIDTH / total if total else 0.0
    for span in spans:
        x, width = scale * span.start, max(0.3, scale * span.seconds)
        y = _LANE * lanes.index(span.kind) + 2
        title = escape(f"{span.kind}, {time_text(span.seconds)}: {span.label}")
        place = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 4}"'
        yield f'<rect {place} fill="{_COLOURS[span.kind]}"><title>{title}</title></rect>'
