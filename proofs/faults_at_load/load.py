"""Busy processes, and the load of the machine while they run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean

import attrs

BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):  # it dies with who started it, however that dies
    for _ in range(1_000_000):
        pass
"""

LOADAVG = Path("/proc/loadavg")

INTERVAL = 1.0
"""Seconds between two looks at the load."""


@attrs.define
class Load:
    """How many threads of the machine could run, at each look."""

    samples: list[int] = attrs.field(factory=list)

    @property
    def mean(self) -> float:
        """Of all looks; 0 where the system does not tell."""
        return mean(self.samples) if self.samples else 0.0


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    started = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


@contextmanager
def measured_load() -> Iterator[Load]:
    """What the machine has to run meanwhile, once a second, without the thread that looks."""
    found, over = Load(), threading.Event()

    def look() -> None:
        with suppress(OSError):
            while not over.wait(INTERVAL):
                running, _ = LOADAVG.read_text().split()[3].split("/")
                found.samples.append(int(running) - 1)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
