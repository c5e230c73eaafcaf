"""The bytes that the rank sends which sends most, in closed form.

`spmd.collectives.traffic` plays the same algorithms through, round by round, on the tensors that ranks hold; the two
are computed independently, so that one checks the other. Here nothing depends on the number of ranks: of the chunks
of a dim few are different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from spmd.collectives.traffic import StepKind
from spmd.core.spec import chunk_bounds


@lru_cache(maxsize=65536)
def chunk_lengths(sizes: tuple[int, ...], counts: tuple[int, ...]) -> frozenset[tuple[int, ...]]:
    """The different lengths that the ranks of a group hold of dims that are cut into nested chunks, rank by rank alike.

    Args:
        sizes: the lengths of the dims.
        counts: the number of ranks along each axis that cuts all of them, major first.

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
    """The first of each run of ranks that hold equal chunks: full ones, the one with the rest, empty ones."""
    starts = {0}
    for size in sizes:
        full = size // -(-size // count) if size else 0
        starts |= {full, full + 1}
    return sorted(start for start in starts if start < count)


def most_sent(
    kind: StepKind, counts: tuple[int, ...], shape: tuple[int, ...], itemsize: int, arguments: Sequence[Any]
) -> float:
    """Bytes that the rank sends which sends most, of a group that runs a collective by the ring algorithm.

    What ranks hold are the chunks of `torch.chunk`, uneven or empty; an all_reduce splits its elements alike. Where all
    chunks are equal it is what `ring_bytes` says.

    Args:
        kind: the collective.
        counts: the number of ranks along each of its mesh axes, major first.
        shape: of the largest operand that a rank has.
        itemsize: bytes an element.
        arguments: those of the primitive after the tensor, on that rank.

    >>> most_sent(StepKind.ALL_REDUCE, (4,), (1,), 4, ())  # three of four blocks are empty
    8.0
    >>> most_sent(StepKind.ALL_GATHER, (4,), (2,), 4, (0, 5))  # the blocks are 2, 2, 1 and 0
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


def _row(shape: tuple[int, ...], *dims: int) -> int:
    """The elements that share their indices along `dims`."""
    return math.prod(size for dim, size in enumerate(shape) if dim not in dims)


def _reduced(numel: int, ranks: int) -> int:
    """Rank i sends all blocks but its own as they are reduced, then all but the next one's: of the smallest two."""
    last = [chunk_bounds(numel, (ranks,), (index,)) for index in (ranks - 2, ranks - 1)]
    return 2 * numel - sum(stop - start for start, stop in last)


def _all_but_the_smallest(length: int, counts: tuple[int, ...]) -> int:
    """In a ring of gathering a rank sends all blocks but its neighbour's, in one of scattering all but its own."""
    return length - min(chunk for (chunk,) in chunk_lengths((length,), counts))


def _exchanged(split: int, concat: int, counts: tuple[int, ...]) -> int:
    """A rank sends, of its chunk of `concat`, all of `split` but its own chunk."""
    return max(held * (split - kept) for held, kept in chunk_lengths((concat, split), counts))
