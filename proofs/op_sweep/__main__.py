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
    parser.add_argument("--device", default="cpu", help="where the virtual ranks are")
    parser.add_argument(
        "--part", default=(1, 1), type=_part, metavar="I/N", help="part I of N of the entries, for N processes"
    )
    options = arguments(parser, SETUPS, seconds=300.0)
    if options.markdown and (options.device != "cpu" or options.part != (1, 1)):
        parser.error("--markdown: the page is about all entries on the CPU. Ask without --device and --part.")
    torch.set_num_threads(1)
    part, parts = options.part
    chosen = entries(options.op)[part - 1 :: parts]
    sweep_entry(entries("addmm$")[0], Setup({"x": 2}, samples=1, limit=1))  # fills caches before the fork
    given = {"samples": options.samples, "limit": options.combinations, "device": options.device}
    given = {key: value for key, value in given.items() if value is not None}
    setups = {name: attrs.evolve(setup, **given) for name, setup in SETUPS.items()}
    reports = run(options, setups, partial(sweep, chosen), len(chosen), _sections)
    show(reports, Console())
    return int(any(report.bad for report in reports.values()))


def _part(text: str) -> tuple[int, int]:
    """The numbers of `I/N`, where I is from 1 to N."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, such as 2/15 (got {text}).")
    return int(part), int(parts)


def _sections(reports: Reports) -> dict[str, str]:
    sections: dict[str, dict[str, Report[Setup]]] = {}
    for name, report in reports.items():
        section = "op_sweep_eager" if report.setup.eager else "op_sweep_layouts" if report.setup.layouts else "op_sweep"
        sections.setdefault(section, {})[name] = report
    write = {"op_sweep": markdown, "op_sweep_layouts": layouts_markdown, "op_sweep_eager": eager_markdown}
    return {section: write[section](found) for section, found in sections.items()}


if __name__ == "__main__":
    raise SystemExit(main())
