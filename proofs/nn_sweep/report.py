"""The tables of a sweep: on the console, and as a section of `proofs/reports/operators.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from proofs.nn_sweep.setups import Setup
from proofs.nn_sweep.subjects import HELPERS, NOT_MODULES, REASONS, module_names
from proofs.op_sweep.command import Report
from proofs.op_sweep.outcome import Outcome, Status, summarize
from proofs.page import table

Reports = Mapping[str, Report[Setup]]


def show(reports: Reports, console: Console) -> None:
    """Print the failures and the counts."""
    failing = Table("name", "status", "setups", "right", "reason", "first error", title="what does not pass")
    for row in _failing(reports):
        failing.add_row(*row)
    if failing.rows:
        console.print(failing)
    counts = Table("", *reports, title="sweep")
    for row in _counts(reports):
        counts.add_row(*row)
    console.print(counts)
    for line in _verdict(reports):
        console.print(line)


def markdown(reports: Reports) -> str:
    """The section of `proofs/reports/operators.md`."""
    lines = [
        "# Modules and functions of torch.nn, linalg, fft and special",
        "",
        f"Every public class of `torch.nn` (torch {torch.__version__.split('+')[0]}), and every public function of "
        "`torch.nn.functional`, `torch.linalg`, `torch.fft` and `torch.special` that torch's operator database lacks, "
        "on virtual ranks against plain torch. Calls are those of torch's module database "
        "(`torch.testing._internal.common_modules.module_db`), and others made by hand: of what it lacks, and with "
        "batches that do not divide. This section is written by",
        "",
        "    python -m proofs.nn_sweep --markdown proofs/reports/operators.md",
        "",
        "A call is a function of parameters, buffers and inputs (`torch.func.functional_call`); its results are those "
        "of the module and the buffers that it leaves, and with gradients those of all floating parameters and inputs "
        "(`torch.func.vjp`). Placements: parameters replicated, or sharded along their first or last dim; inputs "
        "replicated, or sharded along each of their dims; and a fixed sample of any others. Each call "
        "has some of them, evenly chosen, the next call others. What is random draws the numbers of one device.",
        "",
        *table(("setup", "mesh", "mode", "dtype", "results", "calls", "placements of a call"), _setups(reports)),
        "",
        *_verdict(reports),
        "",
        *table(("", *reports), _counts(reports)),
        "",
        "## Modules and functions that do not pass",
        "",
        *table(("name", "status", "setups", "right combinations", "reason", "first error"), _failing(reports)),
        "",
        "Calls that plain torch does not run, the first of each:",
        "",
        *table(("name", "setups", "reason"), _skipped(reports)),
        "",
        f"Not called: {', '.join(f'{name} ({reason})' for name, reason in NOT_MODULES.items())}; "
        f"helpers in `torch.nn.functional`: {', '.join(sorted(HELPERS))}.",
        "",
        "## Every module and function",
        "",
        "Right combinations (of all, where some are not).",
        "",
        *table(("name", *reports), _all(reports)),
        "",
    ]
    return "\n".join(lines)


_MEMORY = "inputs along their first dim; transposed, sliced, expanded, channels-last in memory, through `spmd.jit`"


def _setups(reports: Reports) -> Iterator[Sequence[str]]:
    for name, report in reports.items():
        setup = report.setup
        mesh = ", ".join(f"{axis}={size}" for axis, size in setup.mesh.items())
        mode = "training" if setup.training else "evaluation"
        results = "results and gradients" if setup.backward else "results"
        calls = f"up to {setup.calls} of the database, all made by hand"
        placements = _MEMORY if setup.memory else f"up to {setup.placements}"
        yield name, mesh, mode, setup.dtype, results, calls, placements


def _verdict(reports: Reports) -> Iterator[str]:
    statuses = _statuses(reports)
    passing = {outcome.name for report in reports.values() for outcome in report.outcomes if outcome.passed}
    modules = set(module_names())
    for what, names in (("modules", statuses.keys() & modules), ("functions", statuses.keys() - modules)):
        right = sum(statuses[name] is Status.PASS for name in names)
        rest = sum(statuses[name] is Status.UNTRACEABLE and name in passing for name in names)
        share = f" ({right / len(names):.1%})" if names else ""
        more = f" ({(right + rest) / len(names):.1%})" if names else ""
        yield (
            f"{right} of {len(names)} {what}{share} pass in every call and setup, and {right + rest}{more} in every "
            "call but those that torch's `make_fx` cannot trace either."
        )
    for kind in ("uneven", "empty"):
        found = {outcome.name for report in reports.values() for outcome in report.outcomes if getattr(outcome, kind)}
        yield f"{len(found)} of them were right with {kind} shards."


def _statuses(reports: Reports) -> dict[str, Status]:
    """The worst status of each module or function over all setups."""
    order = list(Status).index
    found: dict[str, Status] = {}
    for report in reports.values():
        for outcome in report.outcomes:
            found[outcome.name] = max(found.get(outcome.name, Status.SKIPPED), outcome.status, key=order)
    return found


_COUNTED = ("entries", "combinations", "calls refused")


def _counts(reports: Reports) -> Iterator[Sequence[str]]:
    summaries = [summarize(report.outcomes) for report in reports.values()]
    for what in summaries[0] if summaries else ():
        if what.startswith(_COUNTED) and "without any collective" not in what:
            label = what.replace("entries", "modules and functions", 1)
            yield label, *(f"{summary[what]:,}" for summary in summaries)
    yield "seconds", *(f"{report.seconds:,.0f}" for report in reports.values())


def _failing(reports: Reports) -> Iterator[Sequence[str]]:
    for name, outcomes in _by_name(reports):
        failing = {
            setup: found for setup, found in outcomes.items() if found.status not in (Status.PASS, Status.SKIPPED)
        }
        for status in sorted({found.status for found in failing.values()}):
            alike = {setup: found for setup, found in failing.items() if found.status is status}
            right = sum(found.passed for found in alike.values())
            run = sum(found.combinations for found in alike.values())
            first = next(iter(alike.values())).reason
            yield name, status.value, ", ".join(alike), f"{right} of {run}", REASONS.get(name, ""), first


def _skipped(reports: Reports) -> Iterator[Sequence[str]]:
    for name, outcomes in _by_name(reports):
        skipped = {
            setup: reason
            for setup, found in outcomes.items()
            if (reason := found.failures.get(Status.SKIPPED)) and not reason.endswith(": no gradient")
        }
        if skipped:
            yield name, ", ".join(skipped), next(iter(skipped.values()))


def _all(reports: Reports) -> Iterator[Sequence[str]]:
    for name, outcomes in _by_name(reports):
        yield name, *(_cell(outcomes.get(setup)) for setup in reports)


def _by_name(reports: Reports) -> Iterator[tuple[str, dict[str, Outcome]]]:
    found: dict[str, dict[str, Outcome]] = {}
    for setup, report in reports.items():
        for outcome in report.outcomes:
            found.setdefault(outcome.name, {})[setup] = outcome
    yield from sorted(found.items())


def _cell(outcome: Outcome | None) -> str:
    if outcome is None or outcome.status is Status.SKIPPED:
        return ""
    if outcome.status is Status.PASS:
        return str(outcome.passed)
    return f"{outcome.status.value}: {outcome.passed} of {outcome.combinations}"
