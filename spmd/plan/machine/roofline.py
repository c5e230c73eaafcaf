"""The time of an operator by its arithmetic and its memory traffic."""

from __future__ import annotations


def memory_traffic(written: float, write_allocate: bool) -> float:
    """The bytes that pass between memory and compute units for a new result of so many; see `Machine`.

    Source: McCalpin, "Memory bandwidth and machine balance in current high performance computers" (1995), which counts
    these reads apart.
    """
    return (1 + write_allocate) * written


def roofline_seconds(arithmetic: float, traffic: float, memory_overlap: float) -> float:
    """The longer of two times in seconds, and what does not overlap of the shorter.

    Source: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
    architectures" (2009), where all of it overlaps.

    Args:
        arithmetic, traffic: what an operator's arithmetic takes alone, and what its memory traffic takes.
        memory_overlap: the part of the shorter that overlaps, from 0 to 1.
    """
    shorter, longer = sorted((arithmetic, traffic))
    return longer + (1 - memory_overlap) * shorter
