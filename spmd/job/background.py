"""What a process runs in the background: the process waits for it before it ends, and fails if it has failed."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

FAILED = 120
"""The exit status of a process whose background work has failed: that of the interpreter if it cannot flush stdout."""

_waits: list[Callable[[], object]] = []

_process: int | None = None
"""The process that calls `_waits` before it ends; a fork of it does not yet."""


def wait_before_exit(wait: Callable[[], object]) -> None:
    """Call a function before this process ends; if it raises an error, that is printed, and the exit status is 120.

    Args:
        wait: waits for what runs in the background, and raises its error if nobody has seen it.
    """
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        atexit.register(_at_exit)
        # processes of multiprocessing end without atexit; before the failure detector, which says that this one ends
        multiprocessing.util.Finalize(None, _at_end_of_multiprocessing, exitpriority=200)
    if wait not in _waits:
        _waits.append(wait)


def wait_for_all() -> None:
    """Wait for all that runs in the background; raise the error of what has failed."""
    for wait in _waits:
        wait()


def _at_exit() -> None:
    if _has_failed():
        sys.stderr = _FailsToFlush(sys.stderr)  # type: ignore[assignment]


def _at_end_of_multiprocessing() -> None:
    if _has_failed():
        multiprocessing.util.Finalize(None, sys.exit, args=(FAILED,), exitpriority=-200)  # after all others


def _has_failed() -> bool:
    """Whether the background work has failed, which is printed then."""
    try:
        wait_for_all()
    except Exception as error:
        print("What ran in the background has failed, and so does this process:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
        return True
    return False


class _FailsToFlush:
    """A stream that cannot be flushed, which makes the interpreter end with status 120 (see `sys.exit`).

    An error of a function of `atexit` does not change the status, and `os._exit` would skip other such functions.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        raise OSError("this process has failed")
