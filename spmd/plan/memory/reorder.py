"""An order of execution that frees values early: the program's outputs are computed one after another.

The operations that one output depends on run before those that only later outputs depend on, and the outputs come in
the order in which they can be ready. So each parameter is updated as soon as its gradient is known, and the temporaries
of the update are freed before the next one.
"""

from __future__ import annotations

import attrs
import torch

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.list_operators import FUSED
from spmd.ir.markers import REDISTRIBUTE, RELABEL

_LIGHT = {*FUSED, REDISTRIBUTE, RELABEL, torch.ops.aten._to_copy.default}


def by_results(graph: Graph) -> dict[Operation, Operation]:
    """The operations in their new order, as a mapping from each old operation to its new one.

    List operators (`_foreach_*`), which need all their elements at once, are split into one operation per element:
    the new operations have no `group`. Operations with effects keep their order; so do all, if there are loops or
    branches, which are none of one output.
    """
    if graph.regions:
        return {operation: attrs.evolve(operation, group=None) for operation in graph.operations}
    position = {operation: index for index, operation in enumerate(graph.operations)}
    needs = _needs(graph)
    ready = _readiness(graph, needs, position)
    producers = graph.producers
    wanted = [producers[value] for value in graph.outputs if value in producers]
    rank: dict[Operation, int] = {}
    for number, last in enumerate(sorted(dict.fromkeys(wanted), key=lambda operation: ready[operation])):
        _mark(last, number, needs, rank)
    order = sorted(graph.operations, key=lambda operation: (rank.get(operation, len(wanted)), position[operation]))
    return {operation: attrs.evolve(operation, group=None) for operation in order}


def _needs(graph: Graph) -> dict[Operation, list[Operation]]:
    """The operations that must precede each: its operands' producers and, for one with an effect, the previous such."""
    producers: dict[Value, Operation] = {}
    needs: dict[Operation, list[Operation]] = {}
    last: Operation | None = None
    for operation in graph.operations:
        needs[operation] = [producers[value] for value in operation.operands if value in producers]
        if operation.effect is not None:
            needs[operation] += [last] if last is not None else []
            last = operation
        producers.update(dict.fromkeys(operation.tensors, operation))
    return needs


def _readiness(
    graph: Graph, needs: dict[Operation, list[Operation]], position: dict[Operation, int]
) -> dict[Operation, int]:
    """For each operation, the latest position of a heavy operation among itself and its dependencies; -1 without any.

    Heavy are all operations but elementwise ones (casts and fused optimizers, too), views and redistributions.
    """
    ready: dict[Operation, int] = {}
    for operation in graph.operations:
        light = operation.op in _LIGHT or operation.is_view or torch.Tag.pointwise in operation.op.tags
        ready[operation] = max((ready[other] for other in needs[operation]), default=-1)
        if not light:
            ready[operation] = max(ready[operation], position[operation])
    return ready


def _mark(last: Operation, number: int, needs: dict[Operation, list[Operation]], rank: dict[Operation, int]) -> None:
    waiting = [last]
    while waiting:
        operation = waiting.pop()
        if operation not in rank:
            rank[operation] = number
            waiting.extend(needs[operation])
