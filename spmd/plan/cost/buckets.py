"""What a collective costs that is launched with others: a part of the latency, and copies to and from the bucket."""

from __future__ import annotations

from spmd.collectives.primitives import KINDS
from spmd.ir.comm import Sent
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
    collective = KINDS[sent[0]]
    return seconds + copying_seconds(machine, 1, collective.copied(ranks, collective.buffer(ranks, sent[2])))


def copying_seconds(machine: Machine, calls: int, copied: float) -> float:
    """Seconds of the copies of so many bytes, to and from the bucket of so many collectives."""
    return calls * _COPYING_OPERATORS * machine.operator_latency + machine.copy_seconds(copied, copied)
