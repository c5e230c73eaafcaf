"""One collective of a plan."""

from __future__ import annotations

import attrs

from spmd.graph import Source


@attrs.frozen
class Comm:
    """One collective of a plan.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        axes: the mesh axes that it spans.
        bytes: bytes sent per rank by the ring algorithm.
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
