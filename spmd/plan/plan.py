"""The frozen product of planning: a spec for every value and a strategy for every operation."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from spmd.graph import Graph, Operation, Source, Value
from spmd.mesh import Mesh
from spmd.rules.strategy import Strategy
from spmd.spec import DTensorSpec


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


@attrs.frozen(eq=False)
class Plan:
    """How a program runs on a mesh.

    Args:
        mesh: the mesh.
        graph: the program, with its redistributions as explicit operations: `spmd::redistribute` moves a value from
            its spec to the spec of the result; `spmd::relabel` renames logical dims and moves nothing.
        logical: the atoms of every dim of every value.
        specs: the spec of every value, over its logical shape.
        strategies: for every operation, its strategy on each mesh axis by name (none for redistributions).
        fallbacks: operations that have no rule and run replicated.
        seconds: predicted time of a step.
        comms: every collective, in order of execution.
    """

    mesh: Mesh
    graph: Graph
    logical: Mapping[Value, tuple[tuple[int, ...], ...]]
    specs: Mapping[Value, DTensorSpec]
    strategies: Mapping[Operation, Mapping[str, Strategy]]
    fallbacks: tuple[Operation, ...]
    seconds: float
    comms: tuple[Comm, ...]
