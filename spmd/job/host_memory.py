"""Memory that a process on processors frees: it is kept for the next step, not returned to the operating system.

A step takes and frees the same memory as the one before. By its defaults, glibc returns large blocks and the end of the
heap, and the next step pays a page fault for every 4 KB of them: 10 to 20% of a step of 50 to 100 MB. Other allocators,
such as torch's for CUDA, keep what is freed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers of the bytes at the end of the heap, and of a block, above which they are returned (mallopt(3))."""

_KEPT = (1 << 30, 32 << 20)
"""The thresholds to set, in bytes, the first that is accepted; earlier versions of glibc accept at most 32 MB."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let glibc keep the memory that this process frees, up to 1 GiB, where it computes on processors.

    Settings of the user's own stay: the variables `MALLOC_*` and `GLIBC_TUNABLES`.

    Returns:
        Whether it does from now on.
    """
    if sys.platform != "linux" or torch.accelerator.is_available() or any(map(_is_setting, environment)):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return all(any(mallopt(name, size) for size in _KEPT) for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD))


def _is_setting(name: str) -> bool:
    return name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"


def release_freed_memory() -> None:
    """Return to the operating system what this process has freed, where the next step does not take the same.

    glibc has freed memory between what is held, of sizes that no later tensor may have.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
