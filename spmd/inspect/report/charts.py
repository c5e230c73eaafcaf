"""The charts of a report, as SVG on one time axis: bars of operators and collectives, and the memory of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from html import escape

from spmd.core.quantity import size_text, time_text
from spmd.inspect.report.figures import PlanFigures, Span

_LEFT, _WIDTH, _LANE = 90.0, 900.0, 22
_MEMORY = 110.0
COLOURS = {
    "compute": "#4c78a8",
    "all_reduce": "#e45756",
    "all_gather": "#f58518",
    "reduce_scatter": "#54a24b",
    "all_to_all": "#b279a2",
    "permute": "#9d755d",
}
"""The lanes of the timeline, with their colours."""


def timeline(report: PlanFigures) -> str:
    """Bars in order of predicted time, one lane for compute and one for each kind of collective, and a time axis."""
    lanes = [kind for kind in COLOURS if any(span.kind == kind for span in report.spans)]
    bottom = _LANE * max(1, len(lanes)) + 4.0
    names = "\n".join(_text(_LEFT - 6, _LANE * number + 15, lane, "end") for number, lane in enumerate(lanes))
    bars = "\n".join(_bars(report.spans, lanes, report.seconds))
    axis = "\n".join(_axis(report.seconds, 0.0, bottom))
    return _drawing("timeline", bottom + 20, f"{names}\n{axis}\n{bars}")


def memory_chart(report: PlanFigures) -> str:
    """The bytes that a rank holds over the same time, with the peak."""
    peak = max(held.bytes for held in report.held)
    scale, top = (_MEMORY - 20) / max(1, peak), 16.0
    height = lambda held: top + (_MEMORY - 20) - scale * held  # noqa: E731
    x = _scale(report.seconds)
    points = [f"{x(0.0):.2f},{height(0):.2f}"]
    for held in report.held:
        points += [f"{x(held.start):.2f},{height(held.bytes):.2f}", f"{x(held.stop):.2f},{height(held.bytes):.2f}"]
    points.append(f"{x(report.held[-1].stop):.2f},{height(0):.2f}")
    first = next(held for held in report.held if held.bytes == peak)
    at, bottom = (x(first.start) + x(first.stop)) / 2, height(0)
    parts = [
        f'<polygon points="{" ".join(points)}" fill="{COLOURS["compute"]}" fill-opacity="0.45"/>',
        _line(_LEFT, height(peak), _LEFT + _WIDTH, height(peak), "4 4"),
        f'<circle cx="{at:.2f}" cy="{height(peak):.2f}" r="3.5" fill="currentColor"><title>peak</title></circle>',
        _text(_LEFT - 6, height(peak) + 4, size_text(peak), "end"),
        _text(_LEFT - 6, bottom + 4, "0", "end"),
        *_axis(report.seconds, top, bottom),
    ]
    return _drawing("memory of a rank", bottom + 20, "\n".join(parts))


def ticks(total: float) -> list[float]:
    """Round times from 0 to `total`: four to ten of them.

    >>> [round(1e6 * tick, 2) for tick in ticks(4.1e-6)]
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    """
    if total <= 0:
        return [0.0]
    unit = 10.0 ** math.floor(math.log10(total))
    step = next(unit * part for part in (0.1, 0.2, 0.5, 1.0) if total / (unit * part) < 10)
    return [step * number for number in range(int(total / step * (1 + 1e-9)) + 1)]


def _scale(total: float) -> Callable[[float], float]:
    """From seconds to pixels."""
    return lambda seconds: _LEFT + (_WIDTH * seconds / total if total else 0.0)


def _bars(spans: Iterable[Span], lanes: list[str], total: float) -> Iterator[str]:
    x = _scale(total)
    for span in spans:
        left, y = x(span.start), _LANE * lanes.index(span.kind) + 2
        width = max(0.3, x(span.start + span.seconds) - left)
        title = escape(f"{span.kind}, {time_text(span.seconds)}: {span.label}")
        place = f'x="{left:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 4}"'
        yield f'<rect {place} fill="{COLOURS[span.kind]}"><title>{title}</title></rect>'


def _axis(total: float, top: float, bottom: float) -> Iterator[str]:
    x = _scale(total)
    for tick in ticks(total):
        yield _line(x(tick), top, x(tick), bottom)
        yield _text(x(tick), bottom + 14, time_text(tick) if tick else "0", "middle")
    yield _line(_LEFT, bottom, _LEFT + _WIDTH, bottom)


def _line(x1: float, y1: float, x2: float, y2: float, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    place = f'x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"'
    return f'<line {place} stroke="currentColor" stroke-opacity="0.35"{dashed}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _drawing(label: str, height: float, body: str) -> str:
    box = f'viewBox="0 0 {_LEFT + _WIDTH + 30:.0f} {height:.0f}"'
    return f'<svg {box} role="img" aria-label="{label}" fill="currentColor" font-size="11">\n{body}\n</svg>'
