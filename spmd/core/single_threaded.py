"""A context manager for work on many small objects: one thread, and no garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """A context manager in which torch uses one thread and Python's garbage collector is off.

    A plan or a program consists of thousands of small objects, and every garbage collection while they are made would
    scan all live ones. On tensors of a few elements, several threads only add synchronization.
    """
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()
