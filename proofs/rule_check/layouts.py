"""Checks which memory layouts operators' kernels need, in processes, on the calls of the rule check and others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.table import Table

from proofs.page import table, write_section
from proofs.pool import Lost, each
from proofs.rule_calls import ARBITRARY, CALLS
from proofs.rule_calls.draws import Calls
from proofs.rule_calls.unruled import UNRULED
from spmd.ir.random_operators import TEMPLATED
from spmd.rules.layouts import DOCUMENTED, Need, need
from spmd.testing.rule_check.layouts import LayoutReport, check_layouts

aten = torch.ops.aten
_Op = torch._ops.OpOverload


@attrs.frozen(eq=False)
class LayoutTask:
    """An operator and the calls that it is run on; `met` as in `check_layouts`."""

    op: _Op
    calls: Calls
    met: bool = False

    def check(self) -> LayoutReport:
        """Run it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check_layouts(self.op, self.calls, values=self.op not in ARBITRARY, met=self.met)


def layout_tasks(pattern: str, recorded: Mapping[_Op, Calls]) -> list[LayoutTask]:
    """The operators whose name contains `pattern` (`name$` matches exactly), with their calls.

    Left out are operators that have no CPU kernel, since their substitutes show nothing about them, and random
    operators that use their operand as a template only: they draw in memory order, and their template is made for them.
    Also left out are `copy`, and gathers with an index that is not int64, which do not occur in programs.
    """
    calls: dict[_Op, list[Any]] = {}
    for op, found in (item for source in (CALLS, UNRULED, recorded) for item in source.items()):
        calls.setdefault(op, []).extend(found)
    calls[aten.reshape.default] = calls.get(aten.view.default, [])  # what local programs call in its place
    calls.pop(aten.copy.default, None)
    calls[aten.gather.default] = [call for call in calls[aten.gather.default] if call[0][2].dtype is torch.int64]
    exact, wanted = pattern.endswith("$"), pattern.removesuffix("$")
    names = {str(op): op for op in calls if op not in TEMPLATED and str(op) not in DOCUMENTED}
    chosen = sorted(name for name in names if (wanted == name if exact else wanted in name))
    return [LayoutTask(names[name], calls[names[name]]) for name in chosen]


def check_all(tasks: Sequence[LayoutTask], *, jobs: int, seconds: float = 300.0) -> Iterator[LayoutReport | str]:
    """Yield the reports as they complete.

    An operator that crashes its process is run again, on the layouts that its declared needs allow. If it crashes again
    or takes too long, a message takes the place of its report.
    """
    crashed = []
    for task, report in each(tasks, lambda task: task.check(), jobs=jobs, seconds=seconds):
        if isinstance(report, Lost) and report.exitcode is not None:
            crashed.append(attrs.evolve(task, met=True))
        else:
            yield f"{task.op}: took too long" if isinstance(report, Lost) else report
    for task, report in each(crashed, lambda task: task.check(), jobs=jobs, seconds=seconds):
        if isinstance(report, Lost):
            yield f"{task.op}: ended its process with {report.exitcode}"
        else:
            declared = {argument.name: need(task.op, argument.name) for argument in task.op._schema.arguments}
            needs = {name: level for name, level in declared.items() if level is not Need.ANY}
            yield attrs.evolve(report, crashed=True, found=needs, unneeded=())


@attrs.define
class LayoutProof:
    """All reports, as they come; `lost` says which operators gave none."""

    reports: list[LayoutReport] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)

    def take(self, found: LayoutReport | str) -> None:
        """Add the report of one operator, or the message in its place."""
        if isinstance(found, str):
            self.lost.append(found)
        else:
            self.reports = sorted([*self.reports, found], key=lambda report: report.op)

    @property
    def failed(self) -> bool:
        """Whether an operator has no report, a needed layout is not declared, or a declared one is not needed."""
        return bool(self.lost) or any(report.failing or report.unneeded for report in self.reports)

    @property
    def sensitive(self) -> list[LayoutReport]:
        """The reports of operators that need a layout."""
        return [report for report in self.reports if report.sensitive or report.crashed]

    def summary(self) -> dict[str, int]:
        """The totals."""
        total = lambda field: sum(len(getattr(report, field)) for report in self.reports)  # noqa: E731
        return {
            "operators": len(self.reports),
            "calls": sum(report.calls for report in self.reports),
            "layouts run": sum(report.runs for report in self.reports),
            "layouts of values that an operator does not take": sum(report.skipped for report in self.reports),
            "operators that need a layout": len(self.sensitive),
            "layouts wrong or refused": total("sensitive"),
            "of them not ruled out by the table": total("failing"),
            "needs in the table that no layout shows": total("unneeded"),
            "operators without a result": len(self.lost),
        }

    def show(self, console: Console) -> None:
        """Print which operators need a layout, the findings and the totals."""
        found = Table("operator", "needs", "layouts", "wrong", title="memory layouts")
        for report in self.sensitive:
            found.add_row(report.op, needs_text(report), str(report.runs), str(len(report.sensitive)))
        console.print(found)
        findings = [*self.lost, *(f"not in the table: {run}" for report in self.reports for run in report.failing)]
        findings += [f"not needed: {report.op}: {name}" for report in self.reports for name in report.unneeded]
        for finding in findings:
            console.print(finding, markup=False, highlight=False)
        totals = Table("total", "")
        for name, count in self.summary().items():
            totals.add_row(name, f"{count:,}")
        console.print(totals)

    def as_json(self) -> dict[str, Any]:
        """All findings as JSON data."""
        return {
            "summary": self.summary(),
            "lost": self.lost,
            "operators": [
                {
                    "op": report.op,
                    "calls": report.calls,
                    "runs": report.runs,
                    "skipped": report.skipped,
                    "crashed": report.crashed,
                    "found": {name: level.name for name, level in report.found.items()},
                    "unneeded": list(report.unneeded),
                    "sensitive": [str(run) for run in report.sensitive],
                    "failing": [str(run) for run in report.failing],
                }
                for report in self.reports
            ],
        }

    def write_markdown(self, page: Path) -> None:
        """Write the totals and the operators that need a layout to their section of a page."""
        lines = [
            "# Memory layouts",
            "",
            "Which operators' kernels read their operands' strides is found by running them: each operand, and all at "
            "once, transposed, sliced, padded, with an offset, expanded (strides of zero) and channels-last, in double "
            "and in single precision, against the same values in contiguous memory. This section is written by",
            "",
            "    python -m proofs.rule_check --layouts --markdown proofs/reports/operators.md",
            "",
            *table(("", ""), ((name, f"{count:,}") for name, count in self.summary().items())),
            "",
            *table(("operator", "needs", "wrong or refused", "for example"), map(_row, self.sensitive)),
            "",
        ]
        write_section(page, "layouts", "\n".join(lines))


def _row(report: LayoutReport) -> tuple[str, str, str, str]:
    if report.crashed:
        return f"`{report.op}`", needs_text(report), "", "its process ends"
    wrong = f"{len(report.sensitive)} of {report.runs}"
    return f"`{report.op}`", needs_text(report), wrong, f"`{report.sensitive[0]}`"


def needs_text(report: LayoutReport) -> str:
    """The needs that were found, by layout: `contiguous: mean, rstd`."""
    levels = [level for level in Need if level in report.found.values()]
    named = {level: [name for name, found in report.found.items() if found is level] for level in levels}
    return "; ".join(f"{level.name.lower()}: {', '.join(names)}" for level, names in named.items())
