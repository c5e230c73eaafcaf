"""Renders a report as a self-contained HTML page: no scripts, and no external styles or images."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from spmd.core.quantity import size_text, time_text
from spmd.inspect.report.charts import memory_chart, timeline
from spmd.inspect.report.figures import PlanFigures

_STYLE = """
.spmd-plan { font: 13px/1.4 system-ui, sans-serif; max-width: 72rem; }
.spmd-plan table { border-collapse: collapse; margin: 0 0 1rem; }
.spmd-plan th, .spmd-plan td { text-align: left; padding: 2px 10px; border-bottom: 1px solid #8884; }
.spmd-plan .number { text-align: right; white-space: nowrap; }
.spmd-plan td:first-child { white-space: nowrap; }
.spmd-plan svg { width: 100%; height: auto; }
"""


_PAGE_STYLE = "<style>:root { color-scheme: light dark; } body { margin: 1.5rem; }</style>"
"""A page of its own is dark where the reader's system is; a notebook has its own colours."""


def render_page(report: PlanFigures) -> str:
    """Render a report as a complete HTML document."""
    title = escape(f"Plan on {report.summary['mesh']}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>\n{_PAGE_STYLE}</head>\n'
        f"<body>\n{render_fragment(report)}\n</body>\n</html>\n"
    )


def render_fragment(report: PlanFigures) -> str:
    """Render a report as an HTML fragment for a page or a notebook's cell."""
    sections = (
        ("Plan", _summary(report)),
        ("Timeline", _timeline(report)),
        *([("Memory", _memory(report))] if report.held else []),
        *([("Layers", _layers(report))] if report.layers else []),
        ("Lines", _lines(report)),
        ("Collectives", _causes(report)),
        *([("Suspicious moves", _suspicious(report))] if report.suspicious else []),
        ("Machine", _table((), report.machine.items(), numbers=())),
    )
    body = "\n".join(f"<section><h3>{title}</h3>\n{content}</section>" for title, content in sections)
    return f'<div class="spmd-plan">\n<style>{_STYLE}</style>\n{body}\n</div>'


def _summary(report: PlanFigures) -> str:
    rows = [*report.summary.items(), *(("runs replicated, without a rule", text) for text in report.fallbacks)]
    return _table((), ((name, text) for name, text in rows), numbers=())


def _layers(report: PlanFigures) -> str:
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


def _lines(report: PlanFigures) -> str:
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


def _causes(report: PlanFigures) -> str:
    rows = (
        (c.kind, ", ".join(c.axes), str(c.count), f"{c.bytes:,.0f}", time_text(c.seconds), c.cause, c.place)
        for c in report.causes
    )
    return _table(("kind", "axes", "count", "bytes", "time", "cause", "line"), rows, numbers=(2, 3, 4))


def _suspicious(report: PlanFigures) -> str:
    rows = (
        (move.kind, size_text(move.bytes), size_text(move.needed), move.cause, move.place, move.advice)
        for move in report.suspicious
    )
    return _table(("kind", "sent", "needed", "cause", "line", "what to do"), rows, numbers=(1, 2))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], numbers: tuple[int, ...]) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        kind = lambda column: ' class="number"' if column in numbers else ""  # noqa: E731
        return "".join(f"<{tag}{kind(n)}>{escape(text)}</{tag}>" for n, text in enumerate(row))

    header = f"<thead><tr>{cells(head, 'th')}</tr></thead>\n" if head else ""
    body = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table>\n{header}<tbody>\n{body}\n</tbody>\n</table>\n"


def _timeline(report: PlanFigures) -> str:
    order = f"Operators and collectives one after the other, {time_text(report.seconds)}"
    return f"<p>{order}; with copies, and where they overlap, {time_text(report.step)}.</p>\n{timeline(report)}\n"


def _memory(report: PlanFigures) -> str:
    return f"<p>What a rank holds over the same time: {report.summary['held per rank']}.</p>\n{memory_chart(report)}\n"
