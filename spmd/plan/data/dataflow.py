"""What a program says of its values, whatever the plan: which fusion keeps out of memory, which are sent together."""

from __future__ import annotations

from collections import defaultdict

import torch

from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.list_operators import FUSED
from spmd.ir.markers import DRAFT_MARKERS, REDISTRIBUTE


def is_pointwise(operation: Operation) -> bool:
    """Whether a compiler would fuse an operation with its neighbours: it is elementwise, or has no tensor operands."""
    return torch.Tag.pointwise in operation.op.tags or operation.op in FUSED or not operation.operands


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


_SEVERAL = 8
"""So many values, at least, are sent together; fewer are priced as if each were launched alone."""


def latency_shares(graph: Graph, bucket_bytes: float) -> dict[Value, float]:
    """For values whose collectives are sent together with others, the part of a launch's latency that each pays.

    Parameters wait from the start of the program, gradients for the optimizer, that is for elementwise operators at the
    end of the program, and results for its end. Those of one dtype that wait alike share launches, of at most
    `bucket_bytes`, by their bytes. Views and markers count as the value that they are made from, and are no use of it.
    """
    root: dict[Value, Value] = {}
    given = dict.fromkeys((*graph.inputs, *(value for value, _ in graph.constants)))
    last = _last_operations(graph)
    early: set[Value] = set()
    used: set[Value] = set()
    made: dict[Value, None] = {}
    for operation in graph.operations:
        origins = [root.get(value, value) for value in operation.operands]
        if operation.op in DRAFT_MARKERS or operation.is_view:
            root.update(dict.fromkeys(operation.tensors, origins[0]))
            continue
        used.update(origins)
        early.update(() if operation in last else origins)
        made.update(dict.fromkeys(() if operation in last else operation.tensors))
    only_late = used - early
    late = [value for value in made if value in only_late]
    results = dict.fromkeys(root.get(value, value) for value in graph.outputs)
    together: dict[tuple[int, torch.dtype], list[Value]] = defaultdict(list)
    for group, values in enumerate((given, late, [value for value in results if value not in used])):
        for value in values:
            together[group, value.meta.dtype].append(value)
    shares: dict[Value, float] = {}
    for waiting in together.values():
        launch = min(sum(value.meta.nbytes for value in waiting), bucket_bytes)
        if len(waiting) >= _SEVERAL and launch:
            shares |= {value: min(value.meta.nbytes / launch, 1.0) for value in waiting}
    return shares | {value: shares[origin] for value, origin in root.items() if origin in shares}


def _last_operations(graph: Graph) -> set[Operation]:
    """The elementwise operations and the reductions to one number that only such ones depend on."""
    needed: set[Value] = set()
    last = set()
    for operation in reversed(graph.operations):
        light = operation.op in DRAFT_MARKERS or operation.is_view or is_pointwise(operation)
        light = light or all(value.meta.numel == 1 for value in operation.tensors)
        if light and needed.isdisjoint(operation.tensors):
            last.add(operation)
        else:
            needed.update(operation.operands)
    return last
