"""Which values of a program depend on which."""

from __future__ import annotations

from spmd.ir.graph import Graph, Value
from spmd.ir.regions import CARRY, ITEM


def independent_values(graph: Graph) -> frozenset[Value]:
    """The values that depend on no input and no constant of the program, on no trip of a loop, and on no key."""
    rooted = {*graph.inputs, *(value for value, _ in graph.constants)}
    for operation in graph.operations:
        draws = operation.op.namespace == "spmd_random"  # its cost is that of a shard
        if draws or operation.op is CARRY or any(operand in rooted for operand in operation.operands):
            rooted.update(operation.tensors)
    return frozenset(graph.producers.keys() - rooted)


def is_read_by_items(graph: Graph, stack: Value) -> bool:
    """Test for a stack that only loops read, item by item: it stays a list, which nothing joins."""
    readers = graph.consumers.get(stack, ())
    return stack not in graph.outputs and all(reader.op is ITEM for reader in readers)
