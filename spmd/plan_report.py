"""`python -m spmd.plan_report plan.json`: the figures of a saved plan in a terminal, or as a page of HTML.

`python -m spmd.plan_report before.json after.json`: how the second plan differs from the first.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from spmd.core.quantity import size_text, time_text
from spmd.errors import PlanError
from spmd.inspect.questions.difference import compare
from spmd.inspect.report.figures import PlanFigures, make_report
from spmd.inspect.report.html import render_page
from spmd.inspect.saving.document import read

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as error:  # pragma: no cover
    raise SystemExit("spmd.plan_report draws its tables with rich: pip install 'spmd[report]'") from error


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command.

    Args:
        arguments: the command line without the program's name; by default that of the process.
        console: where the tables are printed; by default `make_console()`.

    Returns:
        The exit status: 0, or 1 if a file is no plan, or two plans have nothing in common.
    """
    parser = argparse.ArgumentParser(prog="python -m spmd.plan_report", description=__doc__)
    parser.add_argument("file", type=Path, help="a plan that plan.save(path) wrote")
    parser.add_argument("other", type=Path, nargs="?", help="another plan: print how it differs, no tables")
    parser.add_argument("--html", type=Path, metavar="PAGE", help="write a self-contained page there")
    parser.add_argument("--rows", type=int, default=30, help="the most rows of a table (default 30)")
    options = parser.parse_args(arguments)
    try:
        document = read(options.file)
        if options.other is not None:
            print(compare(document, read(options.other)))
            return 0
        report = make_report(document)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 1
    if options.html is not None:
        options.html.write_text(render_page(report), encoding="utf-8")
    console = console or make_console()
    tables = [summary_table(report), lines_table(report, options.rows), causes_table(report, options.rows)]
    if report.suspicious:
        tables.append(suspicious_table(report))
    tables.append(machine_table(report))
    if report.layers:
        tables.insert(1, layers_table(report))
    for table in tables:
        console.print(table)
    return 0


def make_console() -> Console:
    """A console with the width of the terminal, or of 160 columns if there is no terminal and COLUMNS is not set."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=160)


def summary_table(report: PlanFigures) -> Table:
    """The figures of one step of the program: times, bytes, memory, and operators without a rule."""
    table = Table(title="Plan", title_justify="left", show_header=False)
    for name, text in report.summary.items():
        _add_row(table, name, text)
    for text in report.fallbacks:
        _add_row(table, "runs replicated, without a rule", text)
    return table


def machine_table(report: PlanFigures) -> Table:
    """The figures of the machine."""
    table = Table(title="Machine", title_justify="left", show_header=False)
    for name, text in report.machine.items():
        _add_row(table, name, text)
    return table


def layers_table(report: PlanFigures) -> Table:
    """The cost of one layer, for each repeated part of the program and each of the layouts that its layers have."""
    table = Table(title="Layers, each", title_justify="left")
    for name in ("lines", "layers", "operations", "compute", "communication", "sent", "otherwise than most"):
        text = name in ("lines", "layers", "otherwise than most")
        table.add_column(name, justify="left" if text else "right", no_wrap=name == "layers")
    for layer in report.layers:
        figures = time_text(layer.compute), time_text(layer.communication), size_text(layer.bytes)
        _add_row(table, layer.place, layer.layers, str(layer.operations), *figures, layer.otherwise)
    return table


def lines_table(report: PlanFigures, rows: int) -> Table:
    """The `rows` lines of the program with the most predicted time, in order of execution; the others in one row."""
    table = Table(title="Lines of the program", title_justify="left")
    for name in ("line", "code", "operations", "compute", "communication", "sent"):
        table.add_column(name, justify="left" if name in ("line", "code") else "right", no_wrap=name != "code")
    shown = sorted(report.lines, key=lambda line: -(line.compute + line.communication))[:rows]
    for line in report.lines:
        if line in shown:
            figures = time_text(line.compute), time_text(line.communication), size_text(line.bytes)
            _add_row(table, line.place or "no line", line.code, str(line.operations), *figures)
    rest = [line for line in report.lines if line not in shown]
    if rest:
        compute, sent = sum(line.compute for line in rest), sum(line.bytes for line in rest)
        communication = time_text(sum(line.communication for line in rest))
        count = str(sum(line.operations for line in rest))
        _add_row(table, f"{len(rest)} others", "", count, time_text(compute), communication, size_text(sent))
    table.add_section()
    operations = str(sum(line.operations for line in report.lines))
    totals = time_text(report.compute), time_text(report.communication), size_text(report.bytes)
    _add_row(table, "all", "", operations, *totals)
    return table


def causes_table(report: PlanFigures, rows: int) -> Table:
    """The collectives by kind, axes and cause, the most bytes first; those beyond `rows` in one row."""
    table = Table(title="Collectives, by cause", title_justify="left")
    for name in ("kind", "axes", "count", "sent", "time", "cause", "line"):
        table.add_column(name, justify="right" if name in ("count", "sent", "time") else "left")
    for c in report.causes[:rows]:
        _add_row(
            table, c.kind, ", ".join(c.axes), str(c.count), size_text(c.bytes), time_text(c.seconds), c.cause, c.place
        )
    rest = report.causes[rows:]
    if rest:
        count, sent = str(sum(c.count for c in rest)), size_text(sum(c.bytes for c in rest))
        _add_row(table, f"{len(rest)} others", "", count, sent, time_text(sum(c.seconds for c in rest)), "", "")
    table.add_section()
    count = str(sum(c.count for c in report.causes))
    _add_row(table, "all", "", count, size_text(report.bytes), time_text(report.communication), "", "")
    return table


def suspicious_table(report: PlanFigures) -> Table:
    """The collectives that move far more than comes of them, with what to do."""
    table = Table(title="Suspicious moves", title_justify="left")
    for name in ("kind", "sent", "needed", "cause", "line", "what to do"):
        table.add_column(name, justify="right" if name in ("sent", "needed") else "left")
    for move in report.suspicious:
        figures = size_text(move.bytes), size_text(move.needed)
        _add_row(table, move.kind, *figures, move.cause, move.place, move.advice)
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text; code and causes may look like rich's markup."""
    table.add_row(*map(Text, cells))


if __name__ == "__main__":
    raise SystemExit(main())
