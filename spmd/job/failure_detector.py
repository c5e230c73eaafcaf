"""The failure detector: what the processes of a job tell each other when a collective fails.

A collective that fails says nothing of why: a rank may have died, be stuck in the user's code, or wait in another
collective. So each process has a thread that looks twice a second whether a round of reports has begun in the store of
torch.distributed, and then reports where its own main thread is. A process that has died or was stopped reports
nothing; one that ends says so. While all is well nothing is written.

A round costs every process a few operations of the store, however many there are: one of them collects the reports, and
the others read what it has found. It is over when all have reported or the patience of that one is; the next failure
begins another.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TypeAlias

import attrs
import torch.distributed as dist

from spmd.errors import SpmdError
from spmd.job import device_launches
from spmd.job.reports import PATIENCE, Reports
from spmd.job.user_code import line_in

INTERVAL = 0.5
"""Seconds between two looks at the store."""

FAILED, AWAY, WAITS = "failed: ", "is in no collective, ", "waits in "
"""How the report of a process begins."""

ENDED, IN_TURN = "has ended", "has ended in turn, "
"""How the last words of a process begin that did not fail itself, and where the failure of another was the cause."""


@attrs.define(eq=False)
class Round:
    """One exchange of reports.

    Args:
        number: of the rounds of a job, from 0.
        text: what this process reports; empty if another one has begun the round.
        said: the report of each rank, None for ranks that do not answer; None if the store does not answer.
        is_over: whether `said` is there.
    """

    number: int
    text: str = ""
    said: list[str | None] | None = None
    is_over: threading.Event = attrs.field(factory=threading.Event)


@attrs.define(eq=False)
class Reported:
    """The main thread waits in a collective, and a round has had that as the report of this process."""

    round: Round
    what: str


@attrs.frozen
class Interrupted:
    """The last collective of the main thread ended by an error, which the user's code may have caught."""

    error: str


position: str | Reported | Interrupted | None = None
"""The collective in which the main thread waits for others, if it does, and what became of it."""

_Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]

# One for each job that torch.distributed has run in this process.
_detectors: weakref.WeakKeyDictionary[dist.ProcessGroup, FailureDetector] = weakref.WeakKeyDictionary()


def start() -> None:
    """Start the failure detector of the job that torch.distributed runs now; it reports failures here, too."""
    world = dist.group.WORLD
    if world is None or world.size() == 1 or world in _detectors:
        return
    with suppress(AttributeError, NotImplementedError, RuntimeError):  # a store of the user's that cannot be shared
        _detectors[world] = FailureDetector(world)
    if not getattr(sys.excepthook, "is_spmd", False):
        sys.excepthook = _announcing(sys.excepthook)


def current() -> FailureDetector | None:
    """The failure detector of the job that runs now."""
    world = dist.group.WORLD
    return None if world is None else _detectors.get(world)


def announce(error: BaseException) -> None:
    """Tell the other processes that this one ends, and by which error."""
    detector = current()
    if detector is not None:
        detector.end(_last_words(error))


def _announcing(hook: _Hook) -> _Hook:
    """A hook for uncaught exceptions: calls the previous hook, and tells the other processes."""

    def announcing(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, error, traceback)
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            announce(error)

    announcing.is_spmd = True  # type: ignore[attr-defined]
    return announcing


def _last_words(error: BaseException | None) -> str:
    """What a process says when it ends, by an error or without one."""
    if error is None:
        return f"{ENDED}: its script is over or has called sys.exit{_interruption()}"
    if isinstance(error, SystemExit):
        return f"{ENDED} by sys.exit({'' if error.code is None else repr(error.code)}){_interruption()}"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SpmdError) and error.is_of_others:
        return f"{IN_TURN}by {text}"
    return f"{FAILED}{text}" if isinstance(error, Exception) else f"{ENDED} by {type(error).__name__}"


class FailureDetector:
    """A thread that takes part in the rounds of a job, and says when this process ends."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world = weakref.ref(world)
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own, for one that waits keeps others from using it
        store = dist.PrefixStore("spmd", store.clone())  # type: ignore[attr-defined]  # missing in the stubs
        self._rank, self._size = world.rank(), world.size()
        job = (store.add("members", 1) - 1) // self._size  # a store may serve one job after another
        self._store = dist.PrefixStore(f"job{job}", store)
        self._reports = Reports(self._store, self._rank, self._size)
        self._keeps_store = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._next, self._lock = Round(0), threading.Lock()
        self._known: list[str | None] | None = None
        self._words = ""
        self._wakes = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="spmd-failure-detector")
        self._thread.start()
        atexit.register(self._end)
        # processes of multiprocessing end without atexit
        self._finalizer = multiprocessing.util.Finalize(None, self._end, exitpriority=100)

    def ask(self, text: str) -> list[str | None] | None:
        """Where all ranks are, in a round that this process begins unless another one does.

        Args:
            text: where this process is.

        Returns:
            As `hear`.
        """
        with self._lock:
            asked = self._next
            asked.text = text
        self._wakes.set()
        return self.hear(asked)

    def hear(self, asked: Round) -> list[str | None] | None:
        """What was said in a round, when it is over.

        Returns:
            The report of each rank, None for ranks that do not answer; None if the store does not answer.
        """
        asked.is_over.wait(10 * PATIENCE)  # the store may not answer
        if asked.said is None and self._known is not None and (self._known[0] or "").startswith((FAILED, ENDED)):
            return self._known  # the store has ended with its keeper, as that has said
        return asked.said

    def end(self, words: str) -> None:
        """Tell the other processes that this one ends, and end the thread."""
        self._words = self._words or words
        self._wakes.set()
        self._thread.join(5 * PATIENCE)  # the store may not answer

    def _end(self) -> None:
        """End the thread while the interpreter is whole: one that comes back from the store later would abort it.

        https://github.com/pytorch/pytorch/issues/38228
        """
        self.end(_last_words(sys.exc_info()[1]))  # there is an error where multiprocessing ends a process

    def _run(self) -> None:
        with suppress(Exception):  # the store ends with the process that keeps it
            while not self._words and dist.group.WORLD is self._world():
                if self._next.text or self._reports.has_begun(self._next.number):
                    self._take_part()
                else:
                    self._wakes.wait(INTERVAL)
                    self._wakes.clear()
            self._leave()
        with self._lock:
            self._next.is_over.set()
        if not self._words:
            atexit.unregister(self._end)
            self._finalizer.cancel()

    def _take_part(self) -> None:
        """Report where this process is, and read where the others are."""
        with self._lock:
            held, self._next = self._next, Round(self._next.number + 1)
        text = held.text or self._words or _whereabouts(held)
        try:
            self._known = held.said = self._reports.exchange(held.number, text)
        finally:
            held.is_over.set()

    def _leave(self) -> None:
        """Leave last words. The keeper of the store stays until all have done so, or have heard that it ends."""
        self._reports.end(self._words or f"{ENDED} its part in the job, by destroy_process_group")
        if self._keeps_store and not self._reports.all_have_ended():
            self._take_part()
            self._reports.wait_until_heard(self._next.number - 1)


def _whereabouts(held: Round) -> str:
    """Where the main thread is; if it waits in a collective, that is noted as what it has reported in this round.

    If it does not, but its device has not finished a collective, that is where this process waits.
    """
    global position
    if position.__class__ is str:
        reported = Reported(held, "")
        reported.what, position = position, reported  # type: ignore[assignment]  # at once: the main thread writes it, too
    if isinstance(position, Reported):
        return f"{WAITS}{position.what}"
    if (launched := device_launches.launches.unfinished()) is not None:
        return f"{WAITS}{launched.what}"
    line = line_in(sys._current_frames().get(threading.main_thread().ident or 0))
    return f"{AWAY}at {line}{_interruption()}"


def _interruption() -> str:
    """That the last collective was interrupted, in words."""
    return f", after {position.error}" if isinstance(position, Interrupted) else ""
