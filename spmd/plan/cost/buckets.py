"""What a collective costs that is launched with others: a part of the latency, and copies to and from the bucket."""

from __future__ import annotations

from spmd.ir.comm import Sent, StepKind
from spmd.plan.machine.machine import Machine

_COPYING_OPERATORS = 12
"""How many operators and views copy the operand of a collective to the buffer of its launch, and its result from it."""


def bucketed_seconds(machine: Machine, ranks: int, sent: Sent, share: float) -> float:
    """The predicted time of a collective of a redistribution.

    Args:
        machine: the cost constants.
        ranks: the size of its group.
        sent: the collective.
        share: the part of a launch's latency that it pays; 1 if it is launched alone, without a bucket.
    """
    seconds = machine.collective_seconds(*sent, latency_share=share)
    if share == 1:
        return seconds
    return seconds + copying_seconds(machine, 1, _copied_bytes(sent, ranks))


def copying_seconds(machine: Machine, calls: int, copied: float) -> float:
    """Seconds of the copies of so many bytes, to and from the bucket of so many collectives."""
    return calls * _COPYING_OPERATORS * machine.operator_latency + machine.copy_seconds(copied, copied)


def _copied_bytes(sent: Sent, ranks: int) -> float:
    """The bytes that are copied to the bucket and from it, of equal shards.

    The result of an all_reduce is a view of the bucket, and what a reduce_scatter does with the parts that it receives
    is in its measured time.
    """
    larger = buffer_bytes(sent, ranks)
    if sent[0] is StepKind.ALL_GATHER:
        return larger * (1 + 1 / ranks)
    return 2 * larger if sent[0] is StepKind.ALL_TO_ALL else larger


def buffer_bytes(sent: Sent, ranks: int) -> float:
    """The bytes of the operand or the result of a collective, of the larger one, of equal shards; see `Comm.bytes`."""
    kind, _, nbytes = sent
    return nbytes * ranks / max(ranks - 1, 1) / (2 if kind is StepKind.ALL_REDUCE else 1)
