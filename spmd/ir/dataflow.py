"""Which values of a program depend on which."""

from __future__ import annotations

from spmd.ir.graph import Graph, Value


def independent_values(graph: Graph) -> frozenset[Value]:
    """The values that depend on no input and no constant of the program."""
    rooted = {*graph.inputs, *(value for value, _ in graph.constants)}
    for operation in graph.operations:
        if any(operand in rooted for operand in operation.operands):
            rooted.update(operation.tensors)
    return frozenset(graph.producers.keys() - rooted)
