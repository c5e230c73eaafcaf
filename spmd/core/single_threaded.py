"""A context manager for work on many small objects: one thread at a time, and no garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from spmd.core.compile_lock import COMPILING


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """A context manager that one thread at a time enters, in which Python's garbage collector is off.

    A plan or a program consists of thousands of small objects, and every garbage collection while they are made would
    scan all live ones.
    """
    with COMPILING:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
