"""Bytes that ranks send by ring algorithms, simulated round by round."""

from __future__ import annotations

from collections.abc import Sequence


def gather_ring(blocks: Sequence[int]) -> list[int]:
    """Bytes that each rank sends in an all_gather: in round t, rank i sends the block of rank i - t to rank i + 1."""
    count = len(blocks)
    return [sum(blocks[(rank - t) % count] for t in range(count - 1)) for rank in range(count)]


def scatter_ring(blocks: Sequence[int]) -> list[int]:
    """Bytes that each rank sends in a reduce_scatter.

    In round t, rank i sends its partial sum of the block of rank i - 1 - t to rank i + 1.
    """
    count = len(blocks)
    return [sum(blocks[(rank - 1 - t) % count] for t in range(count - 1)) for rank in range(count)]
