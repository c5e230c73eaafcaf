"""A process for every entry, several at once: a hang or a crash costs one entry."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs

from spmd.testing.op_sweep.cases import full_name
from spmd.testing.op_sweep.sweep import Outcome, Setup, Status, sweep_entry

_context = multiprocessing.get_context("fork")  # a child has torch and the database imported already


@attrs.frozen(eq=False)
class _Child:
    name: str
    process: Any
    answers: Connection
    deadline: float

    @classmethod
    def start(cls, entry: Any, setup: Setup, seconds: float) -> _Child:
        answers, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_work, args=(entry, setup, sender), daemon=True)
        process.start()
        sender.close()
        return cls(full_name(entry), process, answers, time.monotonic() + seconds)

    def finish(self) -> Outcome | None:
        """The outcome, once there is one."""
        if self.answers.poll():
            try:
                outcome: Outcome = self.answers.recv()
            except EOFError:
                outcome = Outcome(self.name, Status.CRASH)
                self.process.join()
                outcome.failures.append(f"the process ended with {self.process.exitcode}")
        elif time.monotonic() > self.deadline:
            self.process.kill()
            outcome = Outcome(self.name, Status.HANG)
        else:
            return None
        self.process.join()
        self.answers.close()
        return outcome


def _work(entry: Any, setup: Setup, sender: Connection) -> None:
    sender.send(sweep_entry(entry, setup))


def sweep(entries: Sequence[Any], setup: Setup, *, jobs: int = 2, seconds: float = 120.0) -> Iterator[Outcome]:
    """Run entries in processes and give their outcomes as they come.

    Args:
        entries: of the database.
        setup: what to run of each.
        jobs: how many at once.
        seconds: how long one may take.
    """
    waiting = list(entries)[::-1]
    running: list[_Child] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Child.start(waiting.pop(), setup, seconds))
        left = min(child.deadline for child in running) - time.monotonic()
        wait([child.answers for child in running], max(left, 0.0) + 0.01)
        for child in list(running):
            outcome = child.finish()
            if outcome is not None:
                running.remove(child)
                yield outcome
