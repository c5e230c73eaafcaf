"""Operations that a plan may run again on purpose, and those that it does, which no pass must merge with the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value, freeze
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.ir.regions import STRUCTURE


def is_cheap(operation: Operation) -> bool:
    """Whether an operation may run twice: it is a redistribution, elementwise, or without tensor operands."""
    if len(operation.tensors) != 1 or operation.is_random or operation.is_view:
        return False
    if operation.op is RELABEL or operation.op in STRUCTURE:
        return False
    pointwise = torch.Tag.pointwise in operation.op.tags or not operation.operands
    return operation.op is REDISTRIBUTE or pointwise


def repetitions(graph: Graph, specs: Mapping[Value, DTensorSpec]) -> dict[Operation, int]:
    """The cheap operations that are identical to earlier ones, each with the number of those before it.

    Operations are identical if operator, arguments and result spec are equal. A plan has several only where it
    rematerializes.

    Args:
        graph: a planned program.
        specs: the spec of every value.
    """
    seen: Counter[Any] = Counter()
    found = {}
    for operation in graph.operations:
        if operation.group is not None or not is_cheap(operation):
            continue
        key = operation.op, freeze(operation.args), freeze(dict(operation.kwargs)), specs[operation.tensors[0]]
        if seen[key]:
            found[operation] = seen[key]
        seen[key] += 1
    return found
