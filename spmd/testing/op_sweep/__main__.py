"""`python -m spmd.testing.op_sweep --op PATTERN --json FILE --jobs 2`: a table of what passes, and what does not."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from spmd.testing.op_sweep.cases import entries
from spmd.testing.op_sweep.pool import sweep
from spmd.testing.op_sweep.sweep import Outcome, Setup, Status, sweep_entry


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spmd.testing.op_sweep", description=__doc__)
    parser.add_argument("--op", default="", help="part of an entry's name; 'name$' for exactly one")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--mesh", default="x=4", help="axes of the virtual mesh, as x=2,y=2")
    parser.add_argument("--samples", type=int, default=6, help="calls of each entry")
    parser.add_argument("--combinations", type=int, default=200, help="placements of each call, at most")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for one entry")
    parser.add_argument("--backward", action="store_true", help="with the gradients, by torch.func.vjp")
    parser.add_argument("--partial", action="store_true", help="with partial operands too")
    return parser.parse_args()


def main() -> int:
    """Run the sweep; 1 if anything is wrong, fails or hangs."""
    options = _arguments()
    torch.set_num_threads(1)
    mesh = {name: int(size) for name, size in (axis.split("=") for axis in options.mesh.split(","))}
    setup = Setup(mesh, options.samples, options.combinations, options.partial, options.backward)
    chosen = entries(options.op)
    sweep_entry(entries("addmm$")[0], attrs.evolve(setup, samples=1, limit=1))  # what every process needs, once
    outcomes = []
    with Progress() as progress:
        task = progress.add_task("operators", total=len(chosen))
        for outcome in sweep(chosen, setup, jobs=options.jobs, seconds=options.seconds):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=f"{outcome.name:.30}")
    outcomes.sort(key=lambda outcome: outcome.name)
    summary = summarize(outcomes)
    if options.json:
        report = {"setup": attrs.asdict(setup), "summary": summary, "entries": [attrs.asdict(o) for o in outcomes]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    _print(outcomes, summary)
    return int(any(outcome.status in _BAD for outcome in outcomes))


_BAD = (Status.ERROR, Status.WRONG, Status.HANG, Status.CRASH)


def summarize(outcomes: list[Outcome]) -> dict[str, int]:
    """Counts of entries by status, and of combinations."""
    counts = Counter(outcome.status.value for outcome in outcomes)
    return {
        "entries": len(outcomes),
        **{status.value: counts[status.value] for status in Status},
        "without collective": sum(outcome.local > 0 for outcome in outcomes),
        "of them with a sharded result": sum(outcome.sharded > 0 for outcome in outcomes),
        "combinations": sum(outcome.combinations for outcome in outcomes),
        "combinations right": sum(outcome.passed for outcome in outcomes),
        "combinations wrong": sum(outcome.wrong for outcome in outcomes),
        "combinations in error": sum(outcome.errors for outcome in outcomes),
    }


def _print(outcomes: list[Outcome], summary: dict[str, Any]) -> None:
    console = Console()
    failures = Table("entry", "status", "right", "wrong", "errors", "first failure", title="failures")
    for outcome in outcomes:
        if outcome.status in _BAD:
            counts = (str(outcome.passed), str(outcome.wrong), str(outcome.errors))
            failures.add_row(outcome.name, outcome.status.value, *counts, "\n".join(outcome.failures[:1]))
    if failures.rows:
        console.print(failures)
    table = Table("what", "count", title="sweep")
    for what, count in summary.items():
        table.add_row(what, str(count))
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
