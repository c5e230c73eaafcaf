"""Work on many small objects, without what costs more there than it gives."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """A context in which torch uses one thread and no garbage is collected.

    Collecting looks through all that lives, again and again, while a plan or a program of thousands of small objects is
    made; threads only wait for each other over tensors of a few numbers.
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
