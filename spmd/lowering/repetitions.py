"""Operations that a plan runs again on purpose, which common-subexpression elimination must not merge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value, freeze
from spmd.plan.memory.rematerialization import is_cheap


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
