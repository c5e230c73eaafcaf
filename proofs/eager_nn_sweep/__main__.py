"""`python -m proofs.eager_nn_sweep --name PATTERN`: modules and functions on DTensors outside of `jit`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter

import torch
from rich.console import Console

from proofs.eager_nn_sweep.report import markdown, show
from proofs.eager_nn_sweep.setups import SETUPS, Setup
from proofs.eager_nn_sweep.subjects import Calls, subjects
from proofs.eager_nn_sweep.sweep import sweep_calls
from proofs.op_sweep.command import arguments, run
from proofs.op_sweep.outcome import Outcome
from proofs.op_sweep.pool import outcomes


def main() -> int:
    """Run the sweeps; 1 if anything is wrong, fails or hangs."""
    parser = argparse.ArgumentParser(prog="python -m proofs.eager_nn_sweep", description=__doc__)
    parser.add_argument("--name", default="", help="part of a name, as nn.Linear or optim; 'name$' for exactly one")
    options = arguments(parser, SETUPS, seconds=600.0)
    torch.set_num_threads(1)
    chosen = subjects(options.name)
    sweep_calls(subjects("nn.TransformerEncoderLayer$")[0], Setup({"x": 2}, calls=1, placements=1))  # fills caches
    write = lambda found: {"eager_nn_sweep": markdown(found)}  # noqa: E731
    reports = run(options, SETUPS, partial(_sweep, chosen), len(chosen), write)
    show(reports, Console())
    return int(any(report.bad for report in reports.values()))


def _sweep(chosen: Sequence[Calls], setup: Setup, *, jobs: int, seconds: float) -> Iterator[Outcome]:
    yield from outcomes(chosen, partial(sweep_calls, setup=setup), attrgetter("name"), jobs=jobs, seconds=seconds)


if __name__ == "__main__":
    raise SystemExit(main())
