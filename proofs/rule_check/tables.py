"""The findings for all rules as a table, as JSON and as a section of a page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from proofs.rule_calls.known import reason_of
from spmd.testing.rule_check import Finding, Report


@attrs.define
class Proof:
    """All reports, as they come; `lost` says which rules gave none."""

    searched: bool
    reports: list[Report] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)

    def take(self, found: Report | str) -> None:
        """Add the report of one rule, or the message in its place."""
        if isinstance(found, str):
            self.lost.append(found)
        else:
            self.reports = sorted([*self.reports, found], key=lambda report: report.op)

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.lost) or any(report.wrong or not report.calls for report in self.reports)

    def summary(self) -> dict[str, int | str]:
        """The totals."""
        wrong, missing = (sum(len(getattr(report, kind)) for report in self.reports) for kind in ("wrong", "missing"))
        valid = sum(report.valid for report in self.reports)
        found: dict[str, int | str] = {
            "operators": len(self.reports),
            "calls": sum(report.calls for report in self.reports),
            "strategies": sum(report.strategies for report in self.reports),
            "executions right": sum(report.passed for report in self.reports),
            "executions wrong": wrong,
            "operators without a result": len(self.lost),
        }
        if self.searched:
            share = f"{100 * missing / valid:.1f}%" if valid else "none"
            found |= {"valid rows found by search": valid, "of them missing": missing, "missing, share": share}
        return found

    def show(self, console: Console) -> None:
        """Print the table, the findings and the totals."""
        columns = ("operator", "calls", "strategies", "right", "wrong")
        table = Table(*columns, *(("valid", "missing") if self.searched else ()), title="rules")
        for report in self.reports:
            counts = [report.calls, report.strategies, report.passed, len(report.wrong)]
            counts += [report.valid, len(report.missing)] if self.searched else []
            style = "red" if report.wrong or not report.calls else None
            table.add_row(report.op, *map(str, counts), style=style)
        console.print(table)
        findings = [*self.lost, *(f"wrong: {finding}" for report in self.reports for finding in report.wrong)]
        findings += [f"{report.op} has no call" for report in self.reports if not report.calls]
        findings += [
            f"missing: {finding.call}: {finding.row} ({reason_of(report.op, finding)})"
            for report in self.reports
            for finding in report.missing
        ]
        for finding in findings:
            console.print(finding, markup=False, highlight=False)
        totals = Table("total", "")
        for name, count in self.summary().items():
            totals.add_row(name, f"{count:,}" if isinstance(count, int) else count)
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
                    "strategies": report.strategies,
                    "right": report.passed,
                    "valid": report.valid,
                    "wrong": [_as_json(finding, finding.reason) for finding in report.wrong],
                    "missing": [_as_json(finding, reason_of(report.op, finding)) for finding in report.missing],
                }
                for report in self.reports
            ],
        }

    def write_markdown(self, page: Path) -> None:
        """Write the summary between the two marks of a page, or at its end if it has no marks."""
        text = page.read_text() if page.exists() else ""
        start, stop = _MARKS
        if start not in text:
            text += f"\n{start}\n{stop}\n"
        before, _, rest = text.partition(start)
        page.write_text(f"{before}{start}\n\n{_markdown(self)}\n\n{stop}{rest.partition(stop)[2]}")


def _as_json(finding: Finding, reason: str) -> dict[str, Any]:
    return {"call": finding.call, "ranks": finding.ranks, "row": finding.row, "reason": reason}


_MARKS = (
    "<!-- made by `python -m proofs.rule_check --missing --markdown proofs/reports/rules.md` -->",
    "<!-- end of it -->",
)


def _markdown(proof: Proof) -> str:
    lines = ["| | |", "|---|---|"]
    lines += [f"| {name} | {f'{n:,}' if isinstance(n, int) else n} |" for name, n in proof.summary().items()]
    reasons: Counter[str] = Counter()
    rows: dict[str, set[str]] = {}
    for report in proof.reports:
        for finding in report.missing:
            reason = reason_of(report.op, finding)
            reasons[reason] += 1
            rows.setdefault(reason, set()).add(f"`{report.op.removeprefix('aten.')}`: {finding.row}")
    if reasons:
        lines += ["", "| why it is missing | rows | which |", "|---|---|---|"]
    lines += [f"| {reason} | {count} | {'; '.join(sorted(rows[reason]))} |" for reason, count in reasons.most_common()]
    return "\n".join(lines)
