"""The tables of the proof, for a terminal and for a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from proofs.memory_of_ranks.measure import Row
from proofs.page import table

COLUMNS = ("program", "shards", "ranks", "limit", "plan, bytes", "live, bytes", "live/plan", "allocator/plan", "", "")

SLIGHT = 1024
"""Bytes: a smaller excess is counted on its own."""


def line(row: Row) -> str:
    """A row as a line of text."""
    limit = f" limit {row.limit:,} ({row.share:.0%})" if row.limit is not None and row.share is not None else ""
    what = f"{row.program}, {'even' if row.even else 'uneven'}, {row.ranks} ranks{limit}"
    if not row.plan:
        return f"{what:<60} {row.note}"
    figures = f"plan {row.plan:>12,}  live {row.ratio:5.3f}  allocator {row.allocator_ratio:5.3f}"
    return f"{what:<60} {figures}  {row.note}{'; ' if row.note and row.verdict else ''}{row.verdict}"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The least, the median and the largest ratios, and how many rows are wrong, with and without limits."""
    for name, chosen in (
        ("without limits", [row for row in rows if row.limit is None]),
        ("under limits", [row for row in rows if row.limit is not None]),
    ):
        if not chosen:
            continue
        wrong = sum(bool(row.verdict) for row in chosen)
        slightly = sum(0 < max(row.live) - row.plan < SLIGHT for row in chosen if row.plan)
        slight = f", {slightly} of them by less than {SLIGHT:,} bytes" if slightly else ""
        yield f"{name}: {len(chosen)} cases, {wrong} wrong{slight}"
        measured = [row for row in chosen if row.plan]
        for what, ratios in (
            ("live/plan", [row.ratio for row in measured]),
            ("allocator/plan", [row.allocator_ratio for row in measured]),
        ):
            if ratios:
                least, most, median = min(ratios), max(ratios), statistics.median(ratios)
                yield f"  {what}: {least:.3f} at least, {median:.3f} in the median, {most:.3f} at most"


def markdown(rows: Sequence[Row]) -> str:
    """The section of a page."""
    shown = [
        [
            row.program,
            "even" if row.even else "uneven",
            str(row.ranks),
            "" if row.share is None else f"{row.share:.0%}",
            f"{row.plan:,}" if row.plan else "",
            f"{max(row.live):,}" if row.live else "",
            f"{row.ratio:.3f}" if row.plan else "",
            f"{row.allocator_ratio:.3f}" if row.plan else "",
            row.note if row.plan else "",
            row.verdict,
        ]
        for row in rows
    ]
    lines = [*(f"- {text}" if text[0] != " " else f"  - {text.strip()}" for text in summary(rows)), ""]
    return "\n".join([*lines, *table(COLUMNS, shown), ""])
