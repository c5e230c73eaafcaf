"""`python -m proofs.nn_sweep --module PATTERN`: torch's modules on virtual ranks, against torch."""

from __future__ import annotations

import argparse
from functools import partial

import torch
from rich.console import Console

from proofs.nn_sweep.pool import sweep
from proofs.nn_sweep.report import markdown, show
from proofs.nn_sweep.setups import SETUPS, Setup
from proofs.nn_sweep.subjects import missing_functions, subjects
from proofs.nn_sweep.sweep import sweep_subject
from proofs.op_sweep.command import arguments, run


def main() -> int:
    """Run the sweeps; 1 if anything is wrong, fails or hangs."""
    parser = argparse.ArgumentParser(prog="python -m proofs.nn_sweep", description=__doc__)
    parser.add_argument(
        "--module", default="", help="part of a name, as nn.Linear or fft.fftfreq; 'name$' for exactly one"
    )
    parser.add_argument("--list", action="store_true", help="print the functions that torch's database lacks, and end")
    options = arguments(parser, SETUPS, seconds=600.0)
    if options.list:
        print(*missing_functions(), sep="\n")
        return 0
    torch.set_num_threads(1)
    chosen = subjects(options.module)
    sweep_subject(subjects("nn.TransformerEncoderLayer$")[0], Setup({"x": 2}, calls=1, placements=1))  # fills caches
    reports = run(options, SETUPS, partial(sweep, chosen), len(chosen), lambda found: {"nn_sweep": markdown(found)})
    show(reports, Console())
    return int(any(report.bad for report in reports.values()))


if __name__ == "__main__":
    raise SystemExit(main())
