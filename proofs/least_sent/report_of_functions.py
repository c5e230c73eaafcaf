"""The report of what functions send beside what they must."""

from __future__ import annotations

from collections.abc import Sequence

from proofs.least_sent.figures import Figures, figures
from proofs.least_sent.functions import EXAMPLES, EXCEPTIONS
from proofs.page import table


def markdown() -> str:
    """The table of all functions, and the reasons of those that send more."""
    every = [found for example in EXAMPLES for found in figures(example)]
    old = not_needed(every)
    lines = [
        f"{len(every)} functions and gradients, {sum(found.is_close for found in every)} of them at most 1.25x of what "
        "must be sent, or 2x below 64 kB.",
        "",
        *table(
            ["function", "before, MB", "must send", "bytes only", "default", "ratio", "peak, shards"], map(_row, every)
        ),
        "",
        "More than that, and why:",
        "",
        *(f"- {reason}: {', '.join(names)}." for reason, names in _by_reason(every).items()),
        *([f"- Exceptions that are none any more: {', '.join(old)}."] if old else []),
        "",
    ]
    return "\n".join(lines)


def _row(found: Figures) -> list[str]:
    numbers = [f"{number:,.0f}" for number in (found.least, found.sent, found.default)]
    return [found.name, found.before, *numbers, f"{found.ratio:.2f}", f"{found.peak:.1f}"]


def _by_reason(every: Sequence[Figures]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for found in every:
        if not found.is_close:
            names.setdefault(EXCEPTIONS.get(found.name, "no reason"), []).append(found.name)
    return names


def not_needed(every: Sequence[Figures]) -> list[str]:
    """The names of exceptions that are none any more."""
    close = {found.name: found.is_close for found in every}
    return [name for name in EXCEPTIONS if close.get(name, True)]
