"""How many bytes collectives send: closed forms of the ring algorithms, and a count of the bytes in a virtual run.

The two are computed independently, so that one checks the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import attrs
from torch import Tensor

from spmd.core.spec import chunk_bounds
from spmd.ir.comm import StepKind


def ring_bytes(kind: StepKind, ranks: int, nbytes: float) -> float:
    """Bytes that each rank sends when `ranks` ranks run a collective by the ring algorithm.

    Args:
        kind: the collective; steps without communication send nothing.
        ranks: the size of a group.
        nbytes: bytes on one rank: of the result for an all_gather, of the operand for all others.

    Source: Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005).

    >>> ring_bytes(StepKind.ALL_REDUCE, 4, 1000), ring_bytes(StepKind.ALL_GATHER, 4, 1000)
    (1500.0, 750.0)
    """
    if ranks == 1 or not kind.is_collective:
        return 0.0
    if kind is StepKind.PERMUTE:
        return float(nbytes)
    rounds = 2 if kind is StepKind.ALL_REDUCE else 1
    return rounds * (ranks - 1) * nbytes / ranks


@attrs.frozen
class Transfer:
    """One collective that ran: its kind, its mesh axes, and the bytes that each rank sent, by rank."""

    kind: StepKind
    axes: tuple[str, ...]
    sent: tuple[int, ...]


@attrs.define
class Traffic:
    """The collectives that ran inside a `record_traffic` block, in order."""

    transfers: list[Transfer] = attrs.field(factory=list)

    def record(self, kind: StepKind, axes: Sequence[str], sent: Sequence[int]) -> None:
        """Add a collective that ran; the arguments are the fields of `Transfer`."""
        self.transfers.append(Transfer(kind, tuple(axes), tuple(sent)))

    def sent(self, kind: str | None = None) -> float:
        """Bytes sent per rank (the mean over ranks) by all collectives, or by those of one kind."""
        chosen = [transfer for transfer in self.transfers if kind in (None, transfer.kind)]
        return math.fsum(sum(transfer.sent) / len(transfer.sent) for transfer in chosen)


_traffic: ContextVar[Traffic | None] = ContextVar("spmd_traffic", default=None)


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record the collectives that the virtual runtime runs inside the `with` block, and the bytes that they send.

    >>> with record_traffic() as traffic:
    ...     pass
    >>> traffic.sent()
    0.0
    """
    traffic = Traffic()
    token = _traffic.set(traffic)
    try:
        yield traffic
    finally:
        _traffic.reset(token)


def active_traffic() -> Traffic | None:
    """The record of the innermost `record_traffic` block, if there is one."""
    return _traffic.get()


def sent_bytes(kind: StepKind, arguments: Sequence[tuple], results: Sequence[Tensor]) -> list[int]:
    """Bytes that each rank of one group sends by the ring algorithm, simulated round by round on their tensors.

    Args:
        kind: the kind of the collective.
        arguments: the primitive's arguments on each rank of the group.
        results: its result on each rank.

    Returns:
        The bytes that each rank sends, in group order.
    """
    inputs: list[Tensor] = [rank_arguments[0] for rank_arguments in arguments]
    ranks = range(len(inputs))
    if kind is StepKind.ALL_REDUCE:
        numel = inputs[0].numel()
        bounds = [chunk_bounds(numel, (len(inputs),), (index,)) for index in ranks]
        blocks = [(stop - start) * inputs[0].element_size() for start, stop in bounds]
        return [a + b for a, b in zip(_scatter_ring(blocks), _gather_ring(blocks), strict=True)]
    if kind is StepKind.ALL_GATHER:
        return _gather_ring([x.nbytes for x in inputs])
    if kind is StepKind.REDUCE_SCATTER:
        return _scatter_ring([result.nbytes for result in results])
    if kind is StepKind.ALL_TO_ALL:
        return [_exchange_sent(rank, arguments) for rank in ranks]
    sources = list(arguments[0][1])
    return [x.nbytes * sum(source == rank != to for to, source in enumerate(sources)) for rank, x in enumerate(inputs)]


def _gather_ring(blocks: Sequence[int]) -> list[int]:
    """Bytes that each rank sends in an all_gather: in round t, rank i sends the block of rank i - t to rank i + 1."""
    count = len(blocks)
    return [sum(blocks[(rank - t) % count] for t in range(count - 1)) for rank in range(count)]


def _scatter_ring(blocks: Sequence[int]) -> list[int]:
    """Bytes that each rank sends in a reduce_scatter.

    In round t, rank i sends its partial sum of the block of rank i - 1 - t to rank i + 1.
    """
    count = len(blocks)
    return [sum(blocks[(rank - 1 - t) % count] for t in range(count - 1)) for rank in range(count)]


def _exchange_sent(rank: int, arguments: Sequence[tuple]) -> int:
    """Bytes that a rank of an all_to_all holds of other ranks' chunks; argument 3 is the length of a rank's chunk."""
    x, split_dim = arguments[rank][:2]
    row = x.nbytes // x.shape[split_dim] if x.shape[split_dim] else 0
    return sum(row * chunk[3] for other, chunk in enumerate(arguments) if other != rank)
