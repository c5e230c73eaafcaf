"""The record of a collective: of a plan, and of the program of a rank."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from spmd.ir.source import Source

Sent: TypeAlias = tuple[str, tuple[str, ...], float]
"""A collective: its kind, its mesh axes, and the most bytes that any rank sends."""


@attrs.frozen
class Comm:
    """One collective of a plan.

    A rank's program runs exactly the collectives of its plan, in the plan's order.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        axes: the mesh axes that it spans.
        bytes: the most bytes that any rank sends, by the ring algorithm. With n ranks and equal shards: 2(n-1)/n S for
            an all_reduce of S bytes, (n-1)/n S for an all_gather with a result of S bytes, (n-1)/n S for a
            reduce_scatter or an all_to_all with an argument of S bytes, and S for a permute. Uneven and empty shards
            count with their own sizes (`Collective.most_bytes_sent`; `record_traffic` measures the same on virtual
            ranks). The sizes of a ragged_all_to_all are data: it counts with all of its operand, and its cause says so.
            Between processes, all_gather pads uneven shards to the largest one and sends the padding; reduce_scatter
            does, too, on GPUs and in groups of more than 16 ranks.
        seconds: predicted time.
        cause: for a redistribution, the producer with its spec and the consumer with the spec that it requires; for a
            collective inside a local implementation, the operator.
        source: the line of the user's code; None if unknown.
        launch: the number of its launch, in order of execution; between processes, collectives of one launch are joined
            to one bucket, and sent as one (`spmd.plan.cost.launches`).
        joined: how many collectives its launch has.
        times: how often it runs, in loops; its bytes and its time are those of all runs. In a loop whose length is
            data, once.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    cause: str
    source: Source | None
    launch: int = 0
    joined: int = 1
    times: int = 1

    def __str__(self) -> str:
        return f"{self.sent}: {self.cause}, at {self.source}"

    @property
    def sent(self) -> str:
        """What is sent, as text: `all_reduce over data, 768 bytes, 1 of 53 in launch 1`."""
        together = f", 1 of {self.joined} in launch {self.launch}" if self.joined > 1 else ""
        times = f" in {self.times} runs" if self.times > 1 else ""
        return f"{self.kind} over {', '.join(self.axes)}, {self.bytes:,.0f} bytes{times}{together}"

    @property
    def bytes_of_a_run(self) -> float:
        """The most bytes that any rank sends in one run."""
        return self.bytes / self.times

    def repeated(self, times: int, average: float) -> Comm:
        """The same collective in loops and branches where it runs so many times at most, and on average."""
        if times == average == 1:
            return self
        return attrs.evolve(self, bytes=times * self.bytes, seconds=average * self.seconds, times=times * self.times)
