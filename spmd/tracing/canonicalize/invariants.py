"""What a trip of a loop computes from values outside of the loop alone stands before the loop."""

from __future__ import annotations

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.refusals import refuses_positions
from spmd.ir.regions import BEGINS, BRANCH, CARRY, END, ITEM, LEAVES, OTHERWISE


def move_invariants(graph: Graph) -> Graph:
    """Move operations without effects out of the loops on whose trips they do not depend."""
    regions = graph.regions
    if not regions:
        return graph
    begins: dict[Value, Operation | None] = {}
    open_: list[tuple[Operation | None, list[Operation]]] = [(None, [])]

    def depth(value: Value) -> int:
        """How many loops and branches around a value are open."""
        return next(number for number, (begin, _) in enumerate(open_) if begin is begins.get(value))

    for operation in graph.operations:
        if operation.op in BEGINS:
            open_.append((operation, []))
        elif operation.op is END:
            _, inside = open_.pop()
            open_[-1][1].extend(inside)
        place = len(open_) - 1
        if _moves(operation):
            outer = max((depth(value) for value in operation.operands), default=0)
            while place > outer and (begin := open_[place][0]) is not None and begin.op is not BRANCH:
                place -= 1
        open_[place][1].append(operation)
        left = place - 1 if operation.op in LEAVES else place
        begins.update(dict.fromkeys(operation.tensors, open_[left][0]))
    return attrs.evolve(graph, operations=tuple(open_[0][1]))


def _moves(operation: Operation) -> bool:
    """Test for an operation that may run once where it would run every trip."""
    fixed = operation.op in (CARRY, ITEM, OTHERWISE, *LEAVES) or refuses_positions(operation.op)
    return operation.effect is None and operation.group is None and not fixed
