"""The largest number of bytes that any rank sends in a collective, in closed form.

`spmd.collectives.traffic` simulates the same algorithms round by round on the shards of all ranks; the two are
computed independently, so that one checks the other. The time taken here does not grow with the number of ranks,
because the chunks of a dim have few distinct lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from spmd.collectives.primitives import COLLECTIVES, RAGGED_ALL_TO_ALL
from spmd.core.spec import chunk_bounds
from spmd.ir.comm import StepKind


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


def max_bytes_sent(
    kind: StepKind, counts: tuple[int, ...], shape: tuple[int, ...], itemsize: int, arguments: Sequence[Any]
) -> float:
    """The largest number of bytes that any rank of a group sends in a collective, by the ring algorithm.

    Shards are the chunks of `torch.chunk`, uneven or empty; an all_reduce splits its flat elements in the same way. For
    equal chunks the result is that of `ring_bytes`.

    Args:
        kind: the collective.
        counts: the number of ranks along each of its mesh axes, major first.
        shape: the local shape of the operand, on the rank where it is largest.
        itemsize: bytes per element.
        arguments: the arguments of the primitive after the tensor, on that rank.

    >>> max_bytes_sent(StepKind.ALL_REDUCE, (4,), (1,), 4, ())  # three of four blocks are empty
    8.0
    >>> max_bytes_sent(StepKind.ALL_GATHER, (4,), (2,), 4, (0, 5))  # the blocks are 2, 2, 1 and 0
    20.0
    """
    if math.prod(counts) == 1:
        return 0.0
    if kind is StepKind.ALL_REDUCE:
        return float(_reduced(math.prod(shape), math.prod(counts)) * itemsize)
    if kind is StepKind.PERMUTE:
        is_sent = any(source not in (-1, target) for target, source in enumerate(arguments[0]))
        return float(math.prod(shape) * itemsize * is_sent)
    if kind is StepKind.ALL_TO_ALL:
        split, concat, _, length = arguments[:4]
        return float(_row(shape, split, concat) * _exchanged(shape[split], length, counts) * itemsize)
    dim = arguments[0 if kind is StepKind.ALL_GATHER else 1]
    length = arguments[1] if kind is StepKind.ALL_GATHER else shape[dim]
    return float(_row(shape, dim) * _all_but_the_smallest(length, counts) * itemsize)


def bytes_of_call(
    op: Any, counts: tuple[int, ...], shape: tuple[int, ...], itemsize: int, arguments: Sequence[Any]
) -> float:
    """`max_bytes_sent` of one call of a primitive that communicates.

    The sizes of a ragged_all_to_all are data, so this is what a rank sends that sends every row of its operand once: an
    upper bound where no rank sends a row to several others.
    """
    if op is not RAGGED_ALL_TO_ALL.op:
        return max_bytes_sent(COLLECTIVES[op], counts, shape, itemsize, arguments)
    return float(math.prod(shape) * itemsize) if math.prod(counts) > 1 else 0.0


def _row(shape: tuple[int, ...], *dims: int) -> int:
    """The number of elements for each index along `dims`: the product of the other lengths."""
    return math.prod(size for dim, size in enumerate(shape) if dim not in dims)


def _reduced(numel: int, ranks: int) -> int:
    """The most elements that a rank sends in an all_reduce of `numel` elements.

    Rank i sends all blocks but block i in the reduce_scatter, and all but block i + 1 in the all_gather. That is most
    where the two are the smallest blocks, which are the last two.
    """
    last = [chunk_bounds(numel, (ranks,), (index,)) for index in (ranks - 2, ranks - 1)]
    return 2 * numel - sum(stop - start for start, stop in last)


def _all_but_the_smallest(length: int, counts: tuple[int, ...]) -> int:
    """The most that a rank sends: all chunks but its neighbour's (all_gather), or but its own (reduce_scatter)."""
    return length - min(chunk for (chunk,) in chunk_lengths((length,), counts))


def _exchanged(split: int, concat: int, counts: tuple[int, ...]) -> int:
    """The most that a rank sends in an all_to_all: its chunk of `concat`, times all of `split` but its own chunk."""
    return max(held * (split - kept) for held, kept in chunk_lengths((concat, split), counts))
