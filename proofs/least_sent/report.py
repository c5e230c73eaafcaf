"""The report of what operators send beside what they must."""

from __future__ import annotations

from collections.abc import Sequence

from proofs.least_sent.sweep import LIMIT, Entry
from proofs.page import table


def markdown(entries: Sequence[Entry], ranks: int) -> str:
    """The counts, and the operators above the limit, the worst first."""
    planned = [entry for entry in entries if entry.worst is not None]
    above = sorted((e for e in planned if e.worst and e.worst.ratio > LIMIT), key=_ratio, reverse=True)
    calls, within = sum(e.calls for e in planned), sum(e.within for e in planned)
    share = 100 * len(above) / max(len(planned), 1)
    lines = [
        f"{ranks} ranks, {len(planned)} entries, {calls} calls on placements, of which {within} send at most "
        f"{LIMIT:.0f}x what they must. {len(above)} entries ({share:.1f}%) have a call above it, here the worst one of "
        "each. Ranks of the smallest shard count, too: where few rows are uneven, buffers of equal length are more. "
        f"{len(entries) - len(planned)} more entries have no such call, and {sum(bool(e.failure) for e in entries)} "
        "have one that fails, is refused or takes too long.",
        "",
        *table(
            ["entry", "sent", "least", "ratio", "call"],
            (
                [e.name, f"{e.worst.numbers:.0f}", f"{e.worst.least:.1f}", f"{e.worst.ratio:.1f}", e.worst.label]
                for e in above
                if e.worst
            ),
        ),
        "",
    ]
    return "\n".join(lines)


def _ratio(entry: Entry) -> float:
    return entry.worst.ratio if entry.worst else 0.0
