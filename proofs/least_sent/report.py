"""The report of what operators send beside what they must."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from proofs.least_sent.reasons import reason_of
from proofs.least_sent.sweep import LIMIT, Entry, Kind
from proofs.page import table


def markdown(entries: Sequence[Entry]) -> str:
    """The counts by kind, and the entries above the limit: without a reason, the worst first, and with one."""
    above = sorted(filter(is_above, entries), key=lambda entry: -_ratio(entry))
    without = [entry for entry in above if not reason_of(entry.name)]
    planned = [entry for entry in entries if entry.worst is not None]
    calls, within = sum(entry.calls for entry in planned), sum(entry.within for entry in planned)
    lines = [
        f"{calls} calls on placements, of which {within} send at most {LIMIT:.0f}x what they must.",
        "",
        *table(["entries", "number", "above", "of these without a reason"], _counts(planned)),
        "",
        f"Left out: {sum(entry.is_random for entry in entries)} entries have calls with random results, "
        f"{sum(not entry.worst and not entry.is_random for entry in entries)} have no such call (no sharded operand, "
        f"complex, too large), and {sum(bool(entry.failure) for entry in entries)} one that fails or is refused.",
        "",
    ]
    below = [f"{entry.name}, {entry.below.label}" for entry in entries if entry.below]
    if below:
        lines += [f"The bound is wrong, as plans send less: {'; '.join(below)}.", ""]
    if without:
        lines += ["Without a reason, the worst call of each:", "", *table(_HEAD, map(_row, without)), ""]
    if len(above) > len(without):
        lines += ["With a reason:", "", *table(["entries", "worst", "reason"], _reasons(above)), ""]
    return "\n".join(lines)


_HEAD = ["entry", "sent", "least", "ratio", "call"]


def is_above(entry: Entry) -> bool:
    """Test for a call above the limit."""
    return _ratio(entry) > LIMIT


def _counts(planned: Sequence[Entry]) -> Iterator[list[str]]:
    for kind in Kind:
        chosen = [entry for entry in planned if entry.kind is kind]
        above = [entry for entry in chosen if is_above(entry)]
        without = [entry for entry in above if not reason_of(entry.name)]
        yield [kind.value, str(len(chosen)), _share(above, chosen), _share(without, chosen)]
    above = [entry for entry in planned if is_above(entry)]
    yield [
        "all",
        str(len(planned)),
        _share(above, planned),
        _share([e for e in above if not reason_of(e.name)], planned),
    ]


def _share(part: Sequence[Entry], whole: Sequence[Entry]) -> str:
    return f"{len(part)} ({100 * len(part) / max(len(whole), 1):.1f}%)"


def _row(entry: Entry) -> list[str]:
    worst = entry.worst
    assert worst is not None
    return [entry.name, f"{worst.numbers:.4g}", f"{worst.least:.4g}", f"{worst.ratio:.1f}", worst.label]


def _reasons(above: Sequence[Entry]) -> Iterator[list[str]]:
    by_reason: dict[str, list[Entry]] = {}
    for entry in above:
        if reason_of(entry.name):
            by_reason.setdefault(reason_of(entry.name), []).append(entry)
    for reason, entries in by_reason.items():
        yield [", ".join(entry.name for entry in entries), f"{max(map(_ratio, entries)):.1f}", reason]


def _ratio(entry: Entry) -> float:
    return entry.worst.ratio if entry.worst else 0.0
