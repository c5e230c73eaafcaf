"""The order of a plan in which what is computed from sums of single numbers comes last, if only results depend on it.

A training step returns its loss, which is a sum over ranks. At the end of the program that sum can have been sent with
others.
"""

from __future__ import annotations

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.plan.data.dataflow import is_pointwise


def defer_numbers(graph: Graph) -> Graph:
    """Move elementwise operations on single numbers that have been redistributed to the end, if nothing reads them."""
    late: set[Value] = set()
    outside = [operation for operation in graph.operations if graph.regions.around(operation) is None]
    for operation in outside:
        if _is_of_numbers(operation) and (operation.op is REDISTRIBUTE or not late.isdisjoint(operation.operands)):
            late.update(operation.tensors)
    read: set[Value] = set()
    deferred: list[Operation] = []
    others: list[Operation] = []
    for operation in reversed(graph.operations):
        waits = not late.isdisjoint(operation.operands) and late.issuperset(operation.tensors)
        if waits and read.isdisjoint(operation.tensors):
            deferred.append(operation)
        else:
            others.append(operation)
            read.update(operation.operands)
    return attrs.evolve(graph, operations=(*reversed(others), *reversed(deferred)))


def _is_of_numbers(operation: Operation) -> bool:
    """Whether an operation without effects computes single numbers from such, element by element."""
    if operation.effect is not None or not operation.tensors or operation.group is not None:
        return False
    values = (*operation.operands, *operation.tensors)
    computes = operation.op is REDISTRIBUTE or is_pointwise(operation)
    return computes and all(value.meta.numel == 1 for value in values)
