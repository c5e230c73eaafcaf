"""Runs each task in its own process: a hang or a crash loses one task only."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import attrs

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

_context = multiprocessing.get_context("fork")  # a child has torch and the database imported already


@attrs.frozen
class Lost:
    """Stands for the result of a task that has none; `exitcode` is that of its process, None if it took too long."""

    exitcode: int | None = None


@attrs.frozen(eq=False)
class _Child(Generic[_Task, _Result]):
    task: _Task
    process: Any
    answers: Connection
    deadline: float

    @classmethod
    def start(cls, work: Callable[[_Task], _Result], task: _Task, seconds: float) -> _Child[_Task, _Result]:
        answers, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_send, args=(work, task, sender), daemon=True)
        process.start()
        sender.close()
        return cls(task, process, answers, time.monotonic() + seconds)

    def finish(self) -> _Result | Lost | None:
        """The result, once there is one."""
        result: _Result | Lost
        if self.answers.poll():
            try:
                result = self.answers.recv()
            except EOFError:
                self.process.join()
                result = Lost(self.process.exitcode)
        elif time.monotonic() > self.deadline:
            self.process.kill()
            result = Lost()
        else:
            return None
        self.process.join()
        self.answers.close()
        return result


def _send(work: Callable[[Any], Any], task: Any, sender: Connection) -> None:
    sender.send(work(task))


def each(
    tasks: Sequence[_Task], work: Callable[[_Task], _Result], *, jobs: int = 2, seconds: float = 120.0
) -> Iterator[tuple[_Task, _Result | Lost]]:
    """Run tasks in processes and yield each with its result, as they complete.

    Args:
        tasks: the tasks; they are not pickled, since a process is a fork of this one.
        work: computes the result of a task, which can be pickled and is not None.
        jobs: the number of processes at a time.
        seconds: the time limit of one task.
    """
    waiting = list(tasks)[::-1]
    running: list[_Child[_Task, _Result]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_Child.start(work, waiting.pop(), seconds))
        left = min(child.deadline for child in running) - time.monotonic()
        wait([child.answers for child in running], max(left, 0.0) + 0.01)
        for child in list(running):
            result = child.finish()
            if result is not None:
                running.remove(child)
                yield child.task, result
