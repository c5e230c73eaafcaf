"""One collective of a plan."""

from __future__ import annotations

import attrs

from spmd.ir.graph import Source


@attrs.frozen
class Comm:
    """One collective of a plan.

    It runs as planned: a rank's program has these collectives and no other, in this order.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        axes: the mesh axes that it spans.
        bytes: bytes that the rank sends which sends most, by the ring algorithm, of the pieces that ranks hold: of n
            ranks and a tensor of S bytes in equal pieces, 2(n-1)/n S for an all_reduce, (n-1)/n S of the result for an
            all_gather, (n-1)/n S of the argument for a reduce_scatter and an all_to_all, S for a permute. Uneven and
            empty pieces count as they are (`bytes_sent.py`; `record_traffic` sees the same on virtual ranks).
            Processes pad uneven pieces to the largest for an all_gather or a reduce_scatter, and send as much.
        seconds: predicted time.
        cause: the operator that wanted it, and the spec that it wanted and that was held.
        source: the user's line.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    cause: str
    source: Source | None

    def __str__(self) -> str:
        return f"{self.kind} over {', '.join(self.axes)}, {self.bytes:,.0f} bytes: {self.cause}, at {self.source}"
