"""`python -m spmd.testing.op_sweep --setup forward --op PATTERN`: torch's operators on virtual ranks, against torch."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import attrs
import torch
from rich.console import Console
from rich.progress import Progress

from spmd.testing.op_sweep.cases import entries
from spmd.testing.op_sweep.outcome import BAD
from spmd.testing.op_sweep.pool import sweep
from spmd.testing.op_sweep.report import Report, layouts_markdown, markdown, show
from spmd.testing.op_sweep.setups import SETUPS, Setup
from spmd.testing.op_sweep.sweep import sweep_entry
from spmd.testing.page import write_section


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spmd.testing.op_sweep", description=__doc__)
    parser.add_argument("--op", default="", help="part of an entry's name; 'name$' for exactly one")
    parser.add_argument("--setup", nargs="+", choices=SETUPS, default=list(SETUPS), help="what to run; by default all")
    parser.add_argument("--samples", type=int, help="calls of each entry, in place of the setup's number")
    parser.add_argument("--combinations", type=int, help="placements of each call, at most, in place of the setup's")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for one entry")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    parser.add_argument("--resume", action="store_true", help="run only setups that the JSON file does not have yet")
    parser.add_argument("--markdown", type=Path, help="write the tables to their section of this file")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json FILE, the file to go on with.")
    return options


def main() -> int:
    """Run the sweeps; 1 if anything is wrong, fails or hangs."""
    options = _arguments()
    torch.set_num_threads(1)
    chosen = entries(options.op)
    sweep_entry(entries("addmm$")[0], Setup({"x": 2}, samples=1, limit=1))  # what every process needs, once
    reports = _read(options.json) if options.resume else {}
    with Progress() as progress:
        for name in options.setup:
            if name in reports:
                continue
            given = {"samples": options.samples, "limit": options.combinations}
            setup = attrs.evolve(SETUPS[name], **{key: value for key, value in given.items() if value is not None})
            reports[name] = _run(name, setup, chosen, options, progress)
            _write(options, {name: reports[name] for name in SETUPS if name in reports})
    show(reports, Console())
    return int(any(report.bad for report in reports.values()))


def _run(name: str, setup: Setup, chosen: list[Any], options: argparse.Namespace, progress: Progress) -> Report:
    task = progress.add_task(name, total=len(chosen))
    outcomes, start = [], time.monotonic()
    for outcome in sweep(chosen, setup, jobs=options.jobs, seconds=options.seconds):
        outcomes.append(outcome)
        if outcome.status in BAD:
            progress.console.print(f"{name}: {outcome.name}: {outcome.status.value}: {outcome.reason}", markup=False)
        progress.update(task, advance=1, description=f"{name}: {outcome.name:.30}")
    progress.update(task, description=name)
    return Report(setup, sorted(outcomes, key=lambda outcome: outcome.name), time.monotonic() - start)


def _read(file: Path) -> dict[str, Report]:
    found = json.loads(file.read_text()) if file.exists() else {}
    return {name: Report.of(data) for name, data in found.items()}


def _write(options: argparse.Namespace, reports: dict[str, Report]) -> None:
    """Write what there is so far."""
    if options.json:
        data = {name: report.data() for name, report in reports.items()}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.markdown:
        for name, write, laid_out in (("op_sweep", markdown, False), ("op_sweep_layouts", layouts_markdown, True)):
            found = {setup: report for setup, report in reports.items() if report.setup.layouts is laid_out}
            if found:
                write_section(options.markdown, name, write(found))


if __name__ == "__main__":
    raise SystemExit(main())
