"""The tables of a sweep: on the console, and as the page `proofs/reports/operators.md`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from proofs.op_sweep.command import Report
from proofs.op_sweep.outcome import Outcome, Status, summarize
from proofs.op_sweep.setups import Setup
from proofs.page import table

Reports = Mapping[str, Report[Setup]]

DTENSOR = (
    ("forward: entries with a sharded combination that passes", "319"),
    ("forward: combinations wrong", "282 of 25,137"),
    ("forward: entries in error", "78"),
    ("forward: entries that hang", "1"),
    ("backward: entries that pass", "397 of 472"),
    ("backward: entries in error", "43"),
    ("backward: entries wrong", "8"),
)
"""Recorded measurements of torch's DTensor 2.13 in the same sweep."""


def _make_fx(report: Report[Setup]) -> str | None:
    """How many entries `make_fx` traces, and how many of these pass; None if `make_fx` was not run."""
    traced = [outcome for outcome in report.outcomes if outcome.traced]
    others = [f"{outcome.name} ({outcome.status.value})" for outcome in traced if outcome.unmatched]
    counted = f"make_fx traces {len(traced)} entries; {len(traced) - len(others)} of them pass"
    return f"{counted}; the others: {', '.join(others) or 'none'}" if traced else None


def show(reports: Reports, console: Console) -> None:
    """Print the failures and the counts."""
    failures = Table("setup", "entry", "status", "right", "wrong", "errors", "first failure", title="failures")
    for name, report in reports.items():
        for outcome in report.bad:
            numbers = map(str, (outcome.passed, outcome.wrong, outcome.errors))
            failures.add_row(name, outcome.name, outcome.status.value, *numbers, outcome.reason)
    if failures.rows:
        console.print(failures)
    counts = Table("", *reports, title="sweep")
    for row in _summary(reports):
        counts.add_row(*row)
    console.print(counts)
    for name, report in reports.items():
        line = _make_fx(report)
        if line is not None:
            console.print(f"{name}: {line}")


def markdown(reports: Reports) -> str:
    """The section of `proofs/reports/operators.md`."""
    lines = [
        "# Torch's operators",
        "",
        "Every entry of torch's operator database (`torch.testing._internal.common_methods_invocations.op_db`, torch "
        f"{torch.__version__.split('+')[0]}), run on virtual ranks against plain torch. This section is written by",
        "",
        "    python -m proofs.op_sweep --markdown proofs/reports/operators.md",
        "",
        "A *combination* is one call of an entry with one placement of each operand on each mesh axis. It is right if "
        "all ranks' shards are those of plain torch's results (values to rounding, shapes and dtypes exactly), twice: "
        "with replicated results, and with results that stay where the plan leaves them. It is *without a collective* "
        "if an operand is sharded, a result is sharded or partial, and the program has no collective.",
        "",
        "## Setups",
        "",
        *table(("setup", "mesh", "calls of an entry", "combinations of a call", "what"), _setups(reports)),
        "",
        "Where a call has more combinations, replication and a fixed sample of the others are run. The calls of the "
        "database have dims of 0, 1, 2, 3, 5, 10, ...: 5 over 4 is 2, 2, 1, 0, and 1 over 4 is 1, 0, 0, 0.",
        "",
        "## Counts",
        "",
        *table(("", *reports), _summary(reports)),
        "",
        *(f"{name.capitalize()}: {_make_fx(report)}.\n" for name, report in reports.items() if _make_fx(report)),
        *_coverage(reports),
        "## Beside torch's DTensor",
        "",
        *table(("", "spmd", "DTensor 2.13"), _beside_dtensor(reports)),
        "",
        "DTensor's figures are recorded: torch 2.13, the same exercise on four ranks, forward and backward.",
        "",
        "## What does not pass",
        "",
        *table(("entry", "status", "setups", "right combinations", "reason"), failing(reports)),
        "",
        "Skipped entries, of which plain torch runs nothing here, or nothing that gives a dense tensor:",
        "",
        *table(("entry", "reason"), _skipped(reports)),
        "",
        "Operators that have no rule and no decomposition, and run replicated:",
        "",
        *table(("operator", "entries"), _fallbacks(reports)),
        "",
        "## Every entry",
        "",
        "Right combinations (of all, where some are not), and in brackets those without a collective.",
        "",
        *table(("entry", *reports), _entries(reports)),
        "",
    ]
    return "\n".join(lines)


def layouts_markdown(reports: Reports) -> str:
    """The section of `proofs/reports/operators.md` on operands in other memory layouts."""
    return _section(
        reports,
        "## Calls with operands in other memory",
        "As the sweeps above, but operands are views of the function's arguments: transposed, every other column of a "
        "longer tensor (what is around is NaN), expanded, channels-last; another for each operand, in turns. In the "
        "second half of an entry's calls they are copied to contiguous memory first, by copies that no program has. "
        "This section is written by",
    )


def eager_markdown(reports: Reports) -> str:
    """The section of `proofs/reports/operators.md` on operators outside of `jit`."""
    return _section(
        reports,
        "## Calls outside of `jit`",
        "As the sweeps above, but the operators are called on DTensors, and gradients are those of `.backward()`. This "
        "section is written by",
    )


def _section(reports: Reports, title: str, introduction: str) -> str:
    lines = [
        title,
        "",
        introduction,
        "",
        f"    python -m proofs.op_sweep --setup {' '.join(reports)} --markdown proofs/reports/operators.md",
        "",
        *table(("setup", "mesh", "calls of an entry", "combinations of a call", "what"), _setups(reports)),
        "",
        *table(("", *reports), _summary(reports)),
        "",
        *table(("entry", "status", "setups", "right combinations", "reason"), failing(reports)),
        "",
    ]
    return "\n".join(lines)


def _setups(reports: Reports) -> Iterator[Sequence[str]]:
    for name, report in reports.items():
        setup = report.setup
        mesh = ", ".join(f"{axis}={size}" for axis, size in setup.mesh.items())
        calls = f"{setup.samples} that add lengths of dims" if setup.lengths else f"the first {setup.samples}"
        calls = f"{setup.samples} of many numbers of dims" if setup.layouts else calls
        how = ".backward()" if setup.eager else "torch.func.vjp"
        what = f"results and gradients by {how}" if setup.backward else "results"
        operands = ", operands partial sums, maxima and minima too" if setup.partial else ""
        yield name, mesh, calls, f"up to {setup.limit}", what + operands


def _summary(reports: Reports) -> Iterator[Sequence[str]]:
    summaries = [summarize(report.outcomes) for report in reports.values()]
    for what in summaries[0]:
        yield what, *(f"{summary[what]:,}" for summary in summaries)
    yield "seconds", *(f"{report.seconds:,.0f}" for report in reports.values())


def _coverage(reports: Reports) -> Iterator[str]:
    """How many entries were right with uneven and with empty shards, of those with dims that can have such shards."""
    for kind, fits in (("uneven", _is_uneven), ("empty", _leaves_a_rank_empty)):
        able: set[str] = set()
        right: set[str] = set()
        for report in reports.values():
            ranks = math.prod(report.setup.mesh.values())
            able |= {found.name for found in report.outcomes if any(fits(length, ranks) for length in found.lengths)}
            right |= {found.name for found in report.outcomes if getattr(found, kind)}
        missing = ", ".join(sorted(able - right)) or "none"
        yield f"{len(able & right)} of {len(able)} entries with dims for {kind} shards were right with such shards."
        yield f"The others: {missing}."
        yield ""


def _is_uneven(length: int, ranks: int) -> bool:
    return length % ranks != 0


def _leaves_a_rank_empty(length: int, ranks: int) -> bool:
    return length <= (ranks - 1) * -(-length // ranks)


def _beside_dtensor(reports: Reports) -> Iterator[Sequence[str]]:
    own: dict[str, str] = {}
    for name in ("forward", "backward"):
        if name not in reports:
            continue
        counts = summarize(reports[name].outcomes)
        ran = counts["entries"] - counts["entries: skipped"]
        own[f"{name}: entries with a sharded combination that passes"] = (
            f"{counts['entries right without any collective, result sharded']} sharded throughout, no collective"
        )
        own[f"{name}: combinations wrong"] = f"{counts['combinations wrong']:,} of {counts['combinations']:,}"
        own[f"{name}: entries in error"] = str(counts["entries: error"] + counts["entries: crash"])
        own[f"{name}: entries that hang"] = str(counts["entries: hang"])
        own[f"{name}: entries that pass"] = f"{counts['entries: pass']} of {ran}"
        own[f"{name}: entries wrong"] = str(counts["entries: wrong"])
    for what, theirs in DTENSOR:
        if what in own:
            yield what, own[what], theirs


def failing(reports: Mapping[str, Report[Any]]) -> Iterator[Sequence[str]]:
    """Rows of what does not pass: name, status, setups, combinations that are right, the first error."""
    found: dict[tuple[str, Status], dict[str, Outcome]] = {}
    for name, report in reports.items():
        for outcome in report.outcomes:
            if outcome.status not in (Status.PASS, Status.SKIPPED):
                found.setdefault((outcome.name, outcome.status), {})[name] = outcome
    for (entry, status), outcomes in sorted(found.items()):
        right = sum(outcome.passed for outcome in outcomes.values())
        run = sum(outcome.combinations for outcome in outcomes.values())
        yield entry, status.value, ", ".join(outcomes), f"{right} of {run}", next(iter(outcomes.values())).reason


def _skipped(reports: Reports) -> Iterator[Sequence[str]]:
    first = next(iter(reports.values()))
    for outcome in first.outcomes:
        if outcome.status is Status.SKIPPED:
            yield outcome.name, outcome.reason


def _fallbacks(reports: Reports) -> Iterator[Sequence[str]]:
    found: dict[str, set[str]] = {}
    for report in reports.values():
        for outcome in report.outcomes:
            for operator in outcome.fallbacks:
                found.setdefault(operator, set()).add(outcome.name)
    for operator in sorted(found):
        yield operator, ", ".join(sorted(found[operator]))


def _entries(reports: Reports) -> Iterator[Sequence[str]]:
    by_name = [{outcome.name: outcome for outcome in report.outcomes} for report in reports.values()]
    for name in by_name[0]:
        yield name, *(_cell(found.get(name)) for found in by_name)


def _cell(outcome: Outcome | None) -> str:
    if outcome is None or outcome.status is Status.SKIPPED:
        return ""
    local = f" ({outcome.local})" if outcome.local else ""
    if outcome.status is Status.PASS:
        return f"{outcome.passed}{local}"
    return f"{outcome.status.value}: {outcome.passed} of {outcome.combinations}{local}"
