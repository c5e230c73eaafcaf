"""Lengths of the chunks of dims, as closed forms of what ranks send need them.

The time taken here does not grow with the number of ranks, because the chunks of a dim have few distinct lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from spmd.core.spec import chunk_bounds


@lru_cache(maxsize=65536)
def chunk_lengths(sizes: tuple[int, ...], counts: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    """The distinct local lengths of dims that are all sharded over the same axes, in nested chunks.

    Args:
        sizes: the global lengths of the dims.
        counts: the number of ranks along each of the axes, major first.

    Returns:
        Tuples of one local length for each dim; each is what at least one rank holds.

    >>> sorted(chunk_lengths((5,), (4,))), sorted(chunk_lengths((5, 6), (2,)))
    ([(0,), (1,), (2,)], [(2, 3), (3, 3)])
    """
    if not counts:
        return frozenset({sizes})
    found: set[tuple[int, ...]] = set()
    for index in _distinct_indices(sizes, counts[0]):
        bounds = (chunk_bounds(size, counts[:1], (index,)) for size in sizes)
        found |= chunk_lengths(tuple(stop - start for start, stop in bounds), counts[1:])
    return frozenset(found)


def _distinct_indices(sizes: Iterable[int], count: int) -> list[int]:
    """The first index of each run of equal chunks: the full chunks, the one with the remainder, the empty ones."""
    starts = {0}
    for size in sizes:
        full = size // -(-size // count) if size else 0
        starts |= {full, full + 1}
    return sorted(start for start in starts if start < count)


def row(shape: tuple[int, ...], *dims: int) -> int:
    """The number of elements for each index along `dims`: the product of the other lengths."""
    return math.prod(size for dim, size in enumerate(shape) if dim not in dims)


def all_but_the_smallest(length: int, counts: tuple[int, ...]) -> int:
    """The most that a rank sends: all chunks but its neighbour's (all_gather), or but its own (reduce_scatter)."""
    return length - min(chunk for (chunk,) in chunk_lengths((length,), counts))
