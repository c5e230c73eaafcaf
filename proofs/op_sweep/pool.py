"""Runs each entry in its own process: a hang or a crash loses one entry only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from proofs.op_sweep.cases import full_name
from proofs.op_sweep.outcome import Outcome, Status
from proofs.op_sweep.setups import Setup
from proofs.op_sweep.sweep import sweep_entry
from proofs.pool import Lost, each

_Task = TypeVar("_Task")


def sweep(entries: Sequence[Any], setup: Setup, *, jobs: int = 2, seconds: float = 300.0) -> Iterator[Outcome]:
    """Run entries in processes and yield their outcomes as they complete; in this one on a GPU, which forks cannot use.

    Args:
        entries: entries of the database.
        setup: what to run of each.
        jobs: the number of processes at a time.
        seconds: the time limit of one entry.
    """
    work = partial(sweep_entry, setup=setup)
    if setup.device != "cpu":
        yield from map(work, entries)
    else:
        yield from outcomes(entries, work, full_name, jobs=jobs, seconds=seconds)


def outcomes(
    tasks: Sequence[_Task],
    work: Callable[[_Task], Outcome],
    name: Callable[[_Task], str],
    *,
    jobs: int,
    seconds: float,
) -> Iterator[Outcome]:
    """Run tasks in processes and yield their outcomes as they complete; `name` names those that hang or crash."""
    for task, outcome in each(tasks, work, jobs=jobs, seconds=seconds):
        yield _lost(name(task), outcome) if isinstance(outcome, Lost) else outcome


def _lost(name: str, lost: Lost) -> Outcome:
    outcome = Outcome(name)
    if lost.exitcode is None:
        outcome.note(Status.HANG, "the time was up")
    else:
        outcome.note(Status.CRASH, f"the process ended with {lost.exitcode}")
    return outcome
