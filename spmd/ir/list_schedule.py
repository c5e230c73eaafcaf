"""Joining again the operations that one list operator stood for.

Canonicalization splits `_foreach_add.List(xs, ys)` into one `add.Tensor` an element, so that each element gets its own
specs. What a rank runs is the list operator: one launch for hundreds of parameters.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from spmd.ir.graph import Operation, Value
from spmd.ir.list_operators import join_elements


@attrs.frozen(eq=False)
class Unit:
    """What is lowered at once: one operation, or several that one list operator computes."""

    operations: tuple[Operation, ...]
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def schedule(operations: Sequence[Operation], alone: frozenset[Operation] = frozenset()) -> tuple[Unit, ...]:
    """The operations with groups joined where one list operator exists, in an order in which all inputs are ready.

    Operations in `alone` are never joined. Where nothing is joined the order stays as it is.
    """
    if all(operation.group is None for operation in operations):
        return tuple(map(_single, operations))
    units = _join(operations, alone)
    ordered = _order(units, {operation: index for index, operation in enumerate(operations)})
    if ordered is None:  # joining closed a cycle: lower element by element
        return tuple(_single(operation) for operation in operations)
    return ordered


def _single(operation: Operation) -> Unit:
    return Unit((operation,), operation.op, operation.args, operation.kwargs)


def _join(operations: Sequence[Operation], alone: frozenset[Operation]) -> list[Unit]:
    groups: dict[Any, list[Operation]] = {}
    for operation in operations:
        joinable = operation.group is not None and operation not in alone and len(operation.results) == 1
        key = (operation.group, operation.op, _shared(operation)) if joinable else operation
        groups.setdefault(key, []).append(operation)
    units: list[Unit] = []
    for members in groups.values():
        joined = join_elements(members) if len(members) > 1 else None
        if joined is None:
            units.extend(_single(operation) for operation in members)
        else:
            units.append(Unit(tuple(members), *joined))
    return units


def _shared(operation: Operation) -> Any:
    """What members of one list call have in common: where tensors stand, and the keyword arguments."""
    tensors = tuple(isinstance(argument, Value) for argument in operation.args)
    return tensors, tuple(sorted((name, repr(value)) for name, value in operation.kwargs.items()))


def _order(units: Sequence[Unit], position: Mapping[Operation, int]) -> tuple[Unit, ...] | None:
    """A topological order, as close to the original one as can be; None if there is a cycle."""
    producer = {value: index for index, unit in enumerate(units) for op in unit.operations for value in op.tensors}
    needs = [
        {producer[value] for op in unit.operations for value in op.operands if value in producer} for unit in units
    ]
    users: dict[int, list[int]] = {}
    for index, needed in enumerate(needs):
        for other in needed:
            users.setdefault(other, []).append(index)
    key = [max(position[operation] for operation in unit.operations) for unit in units]
    ready = [(key[index], index) for index, needed in enumerate(needs) if not needed]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, index = heapq.heappop(ready)
        ordered.append(units[index])
        for user in users.get(index, ()):
            needs[user].discard(index)
            if not needs[user]:
                heapq.heappush(ready, (key[user], user))
    return tuple(ordered) if len(ordered) == len(units) else None
