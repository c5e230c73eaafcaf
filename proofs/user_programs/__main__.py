"""`python -m proofs.user_programs [NAME ...]`: scripts as people write them, run twice, beside one device."""

from __future__ import annotations

import argparse
import importlib.util

import torch
from rich.console import Console
from rich.table import Table

from proofs.user_programs.check import GET_STARTED, SCRIPTS, Report, check


def row(report: Report) -> list[str]:
    """A line of the table; of two runs, both figures."""
    programs = " ".join("+".join(map(str, run.programs)) for run in report.mesh)
    live = " ".join(f"{run.live / 1e3:.0f}" for run in report.mesh)
    pairs = list(zip(report.mesh, report.device, strict=True))
    first = " ".join(f"{ours.first:.2f}" for ours, _ in pairs)
    step = " ".join(f"{ours.step * 1e3:.2f}/{one.step * 1e3:.2f}" for ours, one in pairs)
    warned = str(sum(len(run.warned) for run in report.mesh) or "")
    return [report.name, programs, live, first, step, warned, "; ".join(report.problems())]


def main() -> int:
    """Print the table; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m proofs.user_programs", description=__doc__)
    parser.add_argument("names", nargs="*", help="some of the scripts; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = [*SCRIPTS, *[GET_STARTED] * (importlib.util.find_spec("transformers") is not None)]
    table = Table(title="Scripts run twice; a pair has both runs", title_justify="left")
    columns = ("script", "programs", "live, kB", "first calls, s", "step/one device, ms", "warnings", "problems")
    for column in columns:
        table.add_column(column, overflow="fold")
    console, wrong = Console(width=max(140, Console().width)), 0
    for name in options.names or every:
        try:
            cells = row(check(name))
        except Exception as error:
            cells = [name, *[""] * 5, f"{type(error).__name__}: {str(error).splitlines()[0]}"]
        wrong += bool(cells[-1])
        console.print(*cells, sep=" | ", soft_wrap=True)
        table.add_row(*cells)
    console.print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
