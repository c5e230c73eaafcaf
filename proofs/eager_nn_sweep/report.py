"""The tables of the sweep: on the console, and as a section of `proofs/reports/operators.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from rich.console import Console
from rich.table import Table

from proofs.eager_nn_sweep.setups import Setup
from proofs.eager_nn_sweep.subjects import NOT_CALLED
from proofs.op_sweep.command import Report
from proofs.op_sweep.outcome import BAD, Outcome, Status
from proofs.op_sweep.report import failing
from proofs.page import table

Reports = Mapping[str, Report[Setup]]

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "distributions.LowRankMultivariateNormal": "reads a view after a write to another one of the same tensor",
        "nn.utils.vector_to_parameters": "sets the data of parameters to views of a vector",
    }
)
"""Why calls of these are refused."""


def show(reports: Reports, console: Console) -> None:
    """Print the failures and the counts."""
    failing = Table("name", "status", "setups", "right", "reason", "first error", title="what does not pass")
    for row in _failing(reports):
        failing.add_row(*row)
    if failing.rows:
        console.print(failing)
    for line in verdict(reports):
        console.print(line)


def markdown(reports: Reports) -> str:
    """The section of `proofs/reports/operators.md`."""
    lines = [
        "# Modules, optimizers and distributions outside of `jit`",
        "",
        f"Every public class of `torch.nn` (torch {torch.__version__.split('+')[0]}), every function of "
        "`torch.nn.functional`, `torch.nn.init`, `torch.optim`, `torch.distributions` and `torch.nn.utils` on DTensors "
        "outside of `jit` and without `implicit_replication()`, against plain torch: results, buffers, gradients of "
        "`.backward()`, and the parameters after a step of an optimizer. This section is written by",
        "",
        f"    python -m proofs.eager_nn_sweep --setup {' '.join(reports)} --markdown proofs/reports/operators.md",
        "",
        *table(("setup", "mesh", "mode", "dtype", "calls", "placements of a call"), _setups(reports)),
        "",
        *verdict(reports),
        "",
        *table(("", *reports), _counts(reports)),
        "",
        "What is refused or does not pass:",
        "",
        *table(("name", "status", "setups", "right combinations", "reason", "first error"), _failing(reports)),
        "",
        f"Not called: {', '.join(f'{name} ({reason})' for name, reason in NOT_CALLED.items())}.",
        "",
    ]
    return "\n".join(lines)


def verdict(reports: Reports) -> Iterator[str]:
    """The share of names that are refused, and the count of what is worse."""
    found: dict[str, Status] = {}
    for outcome in _every(reports):
        found[outcome.name] = max(found.get(outcome.name, Status.SKIPPED), outcome.status, key=list(Status).index)
    ran = [status for status in found.values() if status is not Status.SKIPPED]
    refused = sum(status is Status.REFUSED for status in ran)
    bad = sum(status in BAD for status in ran)
    yield (
        f"Of {len(ran)} names of which plain torch runs a call, {ran.count(Status.PASS)} pass in every call and setup, "
        f"{refused} ({refused / max(len(ran), 1):.1%}) have a call that is refused, and {bad} one that is wrong, fails "
        "or hangs."
    )
    texts = [(one.name, text) for one in _every(reports) for text in one.failures.values()]
    operands = {name for name, text in texts if "has a plain tensor" in text}
    targets = {name for name, text in texts if "to a plain tensor" in text}
    yield f"{len(operands)} are refused for a plain operand, {len(targets)} because torch writes to a plain tensor."


def _every(reports: Reports) -> Iterator[Outcome]:
    for report in reports.values():
        yield from report.outcomes


def _setups(reports: Reports) -> Iterator[Sequence[str]]:
    for name, report in reports.items():
        setup = report.setup
        mesh = ", ".join(f"{axis}={size}" for axis, size in setup.mesh.items())
        mode = "training" if setup.training else "evaluation"
        calls = f"up to {setup.calls} of torch's databases, all made by hand"
        yield name, mesh, mode, setup.dtype, calls, f"up to {setup.placements}"


def _counts(reports: Reports) -> Iterator[Sequence[str]]:
    for what, field in (
        ("calls", "calls"),
        ("calls refused", "refused"),
        ("combinations", "combinations"),
        ("combinations right", "passed"),
        ("combinations wrong", "wrong"),
        ("combinations in error", "errors"),
    ):
        yield what, *(f"{sum(getattr(one, field) for one in report.outcomes):,}" for report in reports.values())
    yield "seconds", *(f"{report.seconds:,.0f}" for report in reports.values())


def _failing(reports: Reports) -> Iterator[Sequence[str]]:
    for name, *row, first in failing(reports):
        yield name, *row, REASONS.get(name, ""), first
