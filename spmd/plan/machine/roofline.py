"""The time of an operator by its arithmetic and its memory traffic."""

from __future__ import annotations

import attrs


@attrs.frozen
class Roofline:
    """The longer of two times, of arithmetic and of memory traffic, and what does not overlap of the shorter.

    Sources: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
    architectures" (2009), where all of it overlaps; McCalpin, "Memory bandwidth and machine balance in current high
    performance computers" (1995), for `write_allocate`.

    Args:
        flops: floating-point operations per second in one dtype.
        memory_bandwidth, transcendental_seconds, memory_overlap, write_allocate: as in `Machine`.
    """

    flops: float
    memory_bandwidth: float
    transcendental_seconds: float = 0.0
    memory_overlap: float = 1.0
    write_allocate: bool = False

    def traffic(self, read: float, written: float) -> float:
        """The bytes that pass between memory and compute units where operands and new results have so many."""
        return read + (1 + self.write_allocate) * written

    def seconds(self, flops: float, traffic: float, evaluations: float = 0.0) -> float:
        """Seconds of an operator; the arguments are those of `Machine.compute_seconds`."""
        arithmetic = flops / self.flops + evaluations * self.transcendental_seconds
        shorter, longer = sorted((arithmetic, traffic / self.memory_bandwidth))
        return longer + (1 - self.memory_overlap) * shorter
