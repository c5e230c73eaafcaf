"""`python -m spmd.testing.nn_sweep --module PATTERN`: torch's modules on virtual ranks, against torch."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from spmd.testing.nn_sweep.pool import sweep
from spmd.testing.nn_sweep.report import Report, markdown, show
from spmd.testing.nn_sweep.setups import SETUPS
from spmd.testing.nn_sweep.subjects import Subject, missing_functions, subjects
from spmd.testing.op_sweep.outcome import BAD
from spmd.testing.page import write_section


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spmd.testing.nn_sweep", description=__doc__)
    parser.add_argument(
        "--module", default="", help="part of a name, as nn.Linear or fft.fftfreq; 'name$' for exactly one"
    )
    parser.add_argument("--setup", nargs="+", choices=SETUPS, default=list(SETUPS), help="what to run; by default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=600.0, help="time for one module")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    parser.add_argument("--resume", action="store_true", help="run only setups that the JSON file does not have yet")
    parser.add_argument("--markdown", type=Path, help="write the tables to their section of this file")
    parser.add_argument("--list", action="store_true", help="print the functions that torch's database lacks, and end")
    options = parser.parse_args()
    if options.resume and not options.json:
        parser.error("--resume needs --json FILE, the file to go on with.")
    return options


def main() -> int:
    """Run the sweeps; 1 if anything is wrong, fails or hangs."""
    options = _arguments()
    if options.list:
        print(*missing_functions(), sep="\n")
        return 0
    torch.set_num_threads(1)
    chosen = subjects(options.module)
    reports = _read(options.json) if options.resume else {}
    with Progress() as progress:
        for name in options.setup:
            if name not in reports:
                reports[name] = _run(name, chosen, options, progress)
                _write(options, {name: reports[name] for name in SETUPS if name in reports})
    show(reports, Console())
    return int(any(report.bad for report in reports.values()))


def _run(name: str, chosen: Sequence[Subject], options: argparse.Namespace, progress: Progress) -> Report:
    task = progress.add_task(name, total=len(chosen))
    outcomes, start = [], time.monotonic()
    for outcome in sweep(chosen, SETUPS[name], jobs=options.jobs, seconds=options.seconds):
        outcomes.append(outcome)
        if outcome.status in BAD:
            progress.console.print(f"{name}: {outcome.name}: {outcome.status.value}: {outcome.reason}", markup=False)
        progress.update(task, advance=1, description=f"{name}: {outcome.name:.30}")
    progress.update(task, description=name)
    return Report(SETUPS[name], sorted(outcomes, key=lambda outcome: outcome.name), time.monotonic() - start)


def _read(file: Path) -> dict[str, Report]:
    found = json.loads(file.read_text()) if file.exists() else {}
    return {name: Report.of(data) for name, data in found.items()}


def _write(options: argparse.Namespace, reports: dict[str, Report]) -> None:
    """Write what there is so far."""
    if options.json:
        data = {name: report.data() for name, report in reports.items()}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.markdown:
        write_section(options.markdown, "nn_sweep", markdown(reports))


if __name__ == "__main__":
    raise SystemExit(main())
