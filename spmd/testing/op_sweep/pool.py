"""The entries by processes: a hang or a crash costs one entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from spmd.testing.op_sweep.cases import full_name
from spmd.testing.op_sweep.outcome import Outcome, Status
from spmd.testing.op_sweep.setups import Setup
from spmd.testing.op_sweep.sweep import sweep_entry
from spmd.testing.pool import Lost, each


def sweep(entries: Sequence[Any], setup: Setup, *, jobs: int = 2, seconds: float = 300.0) -> Iterator[Outcome]:
    """Run entries in processes and give their outcomes as they come.

    Args:
        entries: of the database.
        setup: what to run of each.
        jobs: how many at once.
        seconds: how long one may take.
    """
    for entry, outcome in each(entries, partial(sweep_entry, setup=setup), jobs=jobs, seconds=seconds):
        yield _lost(entry, outcome) if isinstance(outcome, Lost) else outcome


def _lost(entry: Any, lost: Lost) -> Outcome:
    outcome = Outcome(full_name(entry))
    if lost.exitcode is None:
        outcome.note(Status.HANG, "the time was up")
    else:
        outcome.note(Status.CRASH, f"the process ended with {lost.exitcode}")
    return outcome
