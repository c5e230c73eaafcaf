"""Runs modules and functions in separate processes: a hang or a crash loses one of them only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter

from proofs.nn_sweep.setups import Setup
from proofs.nn_sweep.subjects import Subject
from proofs.nn_sweep.sweep import sweep_subject
from proofs.op_sweep.outcome import Outcome
from proofs.op_sweep.pool import outcomes


def sweep(subjects: Sequence[Subject], setup: Setup, *, jobs: int = 2, seconds: float = 600.0) -> Iterator[Outcome]:
    """Run modules and functions in processes and yield their outcomes as they complete.

    Args:
        subjects: the modules and functions.
        setup: what to run of each.
        jobs: the number of processes at a time.
        seconds: the time limit of one module or function.
    """
    yield from outcomes(subjects, partial(sweep_subject, setup=setup), attrgetter("name"), jobs=jobs, seconds=seconds)
