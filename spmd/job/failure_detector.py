"""The failure detector: what the processes of a job tell each other when a collective fails.

A collective that fails says nothing of why: a rank may have died, be stuck in the user's code, or wait in another
collective. So each process has a thread that looks twice a second whether some rank has reported a failure in the store
of torch.distributed, and then reports where its own main thread is. A process that has died or was stopped reports
nothing. While all is well nothing is written.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import TypeAlias

import torch.distributed as dist

from spmd.job.user_code import is_user_file

INTERVAL = 0.5
"""Seconds between two looks at the store."""

PATIENCE = 3.0
"""Seconds that the other processes have to report where they are."""

FAILED, AWAY, WAITS = "failed: ", "is in no collective, ", "waits in "
"""How the report of a process begins."""

waits_in: str | None = None
"""The collective in which the main thread waits for others."""

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
        detector.ask(f"{FAILED}{type(error).__name__}: {error}")


def _announcing(hook: _Hook) -> _Hook:
    """A hook for uncaught exceptions: calls the previous hook, and tells the other processes."""

    def announcing(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, error, traceback)
        if isinstance(error, Exception):  # who interrupts a job does not want to wait
            announce(error)

    announcing.is_spmd = True  # type: ignore[attr-defined]
    return announcing


class FailureDetector:
    """A thread that waits for a failure in a job, then reports where this process is and reads where the others are."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world = weakref.ref(world)
        store = dist.distributed_c10d._get_default_store()
        # a connection of its own, for one that waits keeps others from using it
        self._store = dist.PrefixStore("spmd", store.clone())  # type: ignore[attr-defined]  # missing in the stubs
        self._rank, self._names = world.rank(), [f"rank{rank}" for rank in range(world.size())]
        self._keeps_store = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._text = ""
        self._said: list[str | None] | None = None
        self._is_over = False
        self._wakes, self._has_heard = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="spmd-failure-detector")
        self._thread.start()
        atexit.register(self._end)

    def ask(self, text: str) -> list[str | None] | None:
        """Where all ranks are; reports a failure if no other process has yet.

        Args:
            text: where this process is.

        Returns:
            The report of each rank, None for ranks that do not answer; None if the store does not answer.
        """
        self._text = text
        self._wakes.set()
        self._has_heard.wait(2 * PATIENCE)  # the store may be gone, and with it the thread
        return self._said

    def _run(self) -> None:
        with suppress(Exception):  # the store ends with the process that keeps it
            if self._has_failed():
                self._listen()
        self._has_heard.set()
        if not self._is_over:
            atexit.unregister(self._end)

    def _has_failed(self) -> bool:
        """Wait for a failure, or until the job is over."""
        while not self._is_over and dist.group.WORLD is self._world():
            if self._text or self._store.check(["failure"]):
                return True
            self._wakes.wait(INTERVAL)
        return False

    def _end(self) -> None:
        """End the thread while the interpreter is whole: one that comes back from the store later would abort it.

        https://github.com/pytorch/pytorch/issues/38228
        """
        self._is_over = True
        self._wakes.set()
        self._thread.join(2 * PATIENCE)  # the store may not answer

    def _listen(self) -> None:
        """Report where this process is, and read where the others are."""
        store, deadline = self._store, time.monotonic() + PATIENCE
        store.set(self._names[self._rank], self._text or _whereabouts())
        store.set("failure", "")
        _wait_for(store, self._names, deadline)
        said = [store.get(name).decode() if store.check([name]) else None for name in self._names]
        store.set(f"{self._names[self._rank]} has heard", "")
        self._said = said
        if self._keeps_store:  # it may end with this process
            answered = [name for name, text in zip(self._names, said, strict=True) if text]
            _wait_for(store, [f"{name} has heard" for name in answered], deadline + INTERVAL)


def _wait_for(store: dist.Store, names: list[str], deadline: float) -> None:
    while not store.check(names) and time.monotonic() < deadline:
        time.sleep(0.05)


def _whereabouts() -> str:
    if waits_in is not None:
        return f"{WAITS}{waits_in}"
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    line = f"at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "at no line of the user's"
    return f"{AWAY}{line}"
