"""Which values fusion keeps out of memory, whatever the plan."""

from __future__ import annotations

import torch

from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE


def is_pointwise(operation: Operation) -> bool:
    """Whether a compiler would fuse an operation with its neighbours: it is elementwise, or has no tensor operands."""
    return torch.Tag.pointwise in operation.op.tags or not operation.operands


def fused_values(graph: Graph) -> frozenset[Value]:
    """The values that a compiler would keep out of memory, because their producer and all consumers are pointwise.

    Views and redistributions count as the value that they are made from. Inputs, constants and outputs are in memory.
    """
    root: dict[Value, Value] = {}
    inner: dict[Value, bool] = {}
    for value in (*graph.inputs, *(value for value, _ in graph.constants)):
        inner[value] = False
    for operation in graph.operations:
        if operation.op is REDISTRIBUTE or operation.is_view:
            for value in operation.tensors:
                root[value] = root.get(operation.operands[0], operation.operands[0])
            continue
        pointwise = is_pointwise(operation)
        for value in operation.tensors:
            inner[value] = pointwise
        if not pointwise and operation.effect is not Effect.HOST:  # a value that is printed is not slower for it
            for value in operation.operands:
                inner[root.get(value, value)] = False
    for value in graph.outputs:
        inner[root.get(value, value)] = False
    return frozenset(value for value in (*inner, *root) if inner[root.get(value, value)])
