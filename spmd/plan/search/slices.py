"""The order of a plan in which a tensor that only a slice is kept of is sliced as soon as it is made.

Every rank draws whole random tensors. So a sharded initialization holds one of them at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import attrs

from spmd.collectives.resharding import only_slices
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import LEAVES


def slice_early(graph: Graph, specs: Mapping[Value, DTensorSpec]) -> Graph:
    """Move each redistribution that only slices, and that alone reads its operand, to just behind what makes that."""
    makers = graph.producers
    behind: dict[Operation, list[Operation]] = defaultdict(list)
    moved = set()
    for operation in graph.operations:
        if operation.op is not REDISTRIBUTE:
            continue
        (value,), (result,) = operation.operands, operation.tensors
        if (
            value in makers
            and makers[value].op not in LEAVES
            and graph.reads[value] == 1
            and only_slices(specs[value], specs[result])
        ):
            behind[makers[value]].append(operation)
            moved.add(operation)
    if not moved:
        return graph
    operations: list[Operation] = []

    def place(operation: Operation) -> None:
        operations.append(operation)
        for slicing in behind[operation]:
            place(slicing)

    for operation in graph.operations:
        if operation not in moved:
            place(operation)
    return attrs.evolve(graph, operations=tuple(operations))
