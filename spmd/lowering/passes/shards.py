"""The pass that creates constant tensors directly as shards."""

from __future__ import annotations

import attrs
import torch

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.names import Namer
from spmd.ir.simplify import simplify

FULL, SHARD = torch.ops.aten.full.default, torch.ops.spmd.shard.default


def shard_factories(graph: Graph) -> Graph:
    """Replace a shard of an `aten.full` by an `aten.full` of the shard's shape, and merge those that are equal then."""
    fulls = {operation.tensors[0]: operation for operation in graph.operations if operation.op is FULL}
    if not any(operation.op is SHARD and operation.args[0] in fulls for operation in graph.operations):
        return graph
    namer = Namer(graph.names)
    replaced: dict[Value, Value] = {}
    operations: list[Operation] = []
    for operation in graph.operations:
        operation = operation.substitute(replaced)
        full = fulls.get(operation.args[0]) if operation.op is SHARD else None
        if full is not None:
            (old,) = operation.tensors
            replaced[old] = Value(namer.numbered("full"), old.meta)
            args = (list(old.meta.shape), *full.args[1:])
            operation = attrs.evolve(operation, op=FULL, args=args, kwargs=full.kwargs, results=(replaced[old],))
        operations.append(operation)
    return simplify(graph.substitute(replaced, tuple(operations)), any_shapes=True)
