"""A line on the terminal while a compilation takes long: which function it is of, at which stage, and how far."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

import attrs

from spmd.job.process import process_index

DELAY = 2.0
"""Seconds of a compilation before there is a line."""

_ERASE = "\r\x1b[2K"


@attrs.frozen
class _Compilation:
    """A compilation: its function, and when it began and was last at work."""

    function: str
    began: float
    seen: float


_last = _Compilation("", 0.0, -math.inf)  # stages run under the lock of compilations, so none races for it


_line: _Line | None = None  # that of the stage that runs


@contextlib.contextmanager
def stage(function: str, name: str) -> Iterator[None]:
    """A context in which a function is at a stage of its compilation: `tracing`, `planning`, ...

    On a terminal, and in the first process of a job, a line says so from `DELAY` seconds after the first stage on, and
    is erased in the end.
    """
    stream: Any = sys.stderr
    if stream is None or not stream.isatty() or process_index():
        yield
        return
    global _last, _line
    now = time.monotonic()
    continues = _last.function == function and now - _last.seen < 1
    began = _last.began if continues else now
    before, _line = _line, (line := _Line(f"spmd: {name} {function} ...", stream))
    timer = threading.Timer(max(0.0, began + DELAY - now), line.show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        line.erase()
        _line = before
        _last = _Compilation(function, began, time.monotonic())


def report(done: str) -> None:
    """Say how far the stage is, in the line if there is one: `12 of 40 layers`."""
    if _line is not None:
        _line.report(done)


class _Line:
    """A line that one thread shows and another erases."""

    def __init__(self, text: str, stream: TextIO) -> None:
        self._text, self._stream, self._done = text, stream, ""
        self._lock = threading.Lock()
        self._is_shown = self._is_over = False

    def show(self) -> None:
        """Write the line, unless it was erased before."""
        with self._lock:
            if not self._is_over:
                self._is_shown = True
                self._write()

    def report(self, done: str) -> None:
        """Let the line say how far the stage is."""
        with self._lock:
            self._done = f" {done}"
            if self._is_shown and not self._is_over:
                self._stream.write(_ERASE)
                self._write()

    def _write(self) -> None:
        text = (self._text + self._done)[: shutil.get_terminal_size().columns - 1]
        try:
            from rich.console import Console  # an optional dependency
            from rich.text import Text
        except ImportError:
            self._stream.write(text)
        else:
            Console(file=self._stream).print(Text(text, style="dim"), end="")
        self._stream.flush()

    def erase(self) -> None:
        """Erase the line if it is there, and never show it again."""
        with self._lock:
            self._is_over = True
            if self._is_shown:
                self._stream.write(_ERASE)
                self._stream.flush()
