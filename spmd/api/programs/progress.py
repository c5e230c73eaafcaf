"""A line on the terminal while a compilation takes long: which function it is of, and at which stage."""

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
    global _last
    now = time.monotonic()
    continues = _last.function == function and now - _last.seen < 1
    began = _last.began if continues else now
    line = _Line(f"spmd: {name} {function} ...", stream)
    timer = threading.Timer(max(0.0, began + DELAY - now), line.show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        line.erase()
        _last = _Compilation(function, began, time.monotonic())


class _Line:
    """A line that one thread shows and another erases."""

    def __init__(self, text: str, stream: TextIO) -> None:
        self._text, self._stream = text[: shutil.get_terminal_size().columns - 1], stream
        self._lock = threading.Lock()
        self._is_shown = self._is_over = False

    def show(self) -> None:
        """Write the line, unless it was erased before."""
        with self._lock:
            if self._is_over:
                return
            self._is_shown = True
            try:
                from rich.console import Console  # an optional dependency
                from rich.text import Text
            except ImportError:
                self._stream.write(self._text)
            else:
                Console(file=self._stream).print(Text(self._text, style="dim"), end="")
            self._stream.flush()

    def erase(self) -> None:
        """Erase the line if it is there, and never show it again."""
        with self._lock:
            self._is_over = True
            if self._is_shown:
                self._stream.write(_ERASE)
                self._stream.flush()
