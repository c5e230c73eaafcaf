"""`python -m proofs.op_sweep --setup forward --op PATTERN`: torch's operators on virtual ranks, against torch."""

from __future__ import annotations

import argparse
from functools import partial

import attrs
import torch
from rich.console import Console

from proofs.op_sweep.cases import entries
from proofs.op_sweep.command import Report, arguments, run
from proofs.op_sweep.pool import sweep
from proofs.op_sweep.report import Reports, eager_markdown, layouts_markdown, markdown, show
from proofs.op_sweep.setups import SETUPS, Setup
from proofs.op_sweep.sweep import sweep_entry


def main() -> int:
    """Run the sweeps; 1 if anything is wrong, fails or hangs."""
    parser = argparse.ArgumentParser(prog="python -m proofs.op_sweep", description=__doc__)
    parser.add_argument("--op", default="", help="part of an entry's name; 'name$' for exactly one")
    parser.add_argument("--samples", type=int, help="calls of each entry, in place of the setup's number")
    parser.add_argument("--combinations", type=int, help="placements of each call, at most, in place of the setup's")
    parser.add_argument("--device", default="cpu", help="where the virtual ranks are; 'cuda' is not for --markdown")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="one of N parts of the entries, to start N processes"
    )
    options = arguments(parser, SETUPS, seconds=300.0)
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    chosen = entries(options.op)[part - 1 :: parts]
    sweep_entry(entries("addmm$")[0], Setup({"x": 2}, samples=1, limit=1))  # fills caches before the fork
    given = {"samples": options.samples, "limit": options.combinations, "device": options.device}
    given = {key: value for key, value in given.items() if value is not None}
    setups = {name: attrs.evolve(setup, **given) for name, setup in SETUPS.items()}
    reports = run(options, setups, partial(sweep, chosen), len(chosen), _sections)
    show(reports, Console())
    return int(any(report.bad for report in reports.values()))


def _sections(reports: Reports) -> dict[str, str]:
    sections: dict[str, dict[str, Report[Setup]]] = {}
    for name, report in reports.items():
        section = "op_sweep_eager" if report.setup.eager else "op_sweep_layouts" if report.setup.layouts else "op_sweep"
        sections.setdefault(section, {})[name] = report
    write = {"op_sweep": markdown, "op_sweep_layouts": layouts_markdown, "op_sweep_eager": eager_markdown}
    return {section: write[section](found) for section, found in sections.items()}


if __name__ == "__main__":
    raise SystemExit(main())
