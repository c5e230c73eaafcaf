"""Joins the operations that come from one list operator (`_foreach_*`) into list operators again.

Canonicalization splits `_foreach_add.List(xs, ys)` into one `add.Tensor` per element, so that each element gets its own
specs. A rank runs the list operator: one call for hundreds of parameters.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from spmd.ir.graph import Operation, Value, iterate_leaves
from spmd.ir.list_operators import join_elements


@attrs.frozen(eq=False)
class Unit:
    """One call in the lowered program: of one operation, or of a list operator that computes several.

    Args:
        operations: the operations of the program that the call computes.
        op: the operator that is called.
        args, kwargs: its arguments.
    """

    operations: tuple[Operation, ...]
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def operands(self) -> tuple[Value, ...]:
        """The distinct tensor arguments, in order of first appearance."""
        if len(self.operations) == 1:
            return tuple(dict.fromkeys(self.operations[0].operands))
        leaves = iterate_leaves((self.args, dict(self.kwargs)))
        return tuple(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Value)))

    @property
    def results(self) -> tuple[Value | None, ...]:
        """The results, in order; None where the operator returns None."""
        if len(self.operations) == 1:
            return self.operations[0].results
        columns = zip(*(operation.results for operation in self.operations), strict=True)
        return tuple(itertools.chain.from_iterable(columns))


def schedule(operations: Sequence[Operation], alone: frozenset[Operation] = frozenset()) -> tuple[Unit, ...]:
    """Join the operations of each group where a list operator for them exists, and order the calls topologically.

    Args:
        operations: the operations of a program, in order of execution.
        alone: operations that are never joined.

    Returns:
        The calls in order of execution: the given order if nothing is joined.
    """
    if all(operation.group is None for operation in operations):
        return tuple(map(_single, operations))
    units = _join(operations, alone)
    ordered = _order(units, {operation: index for index, operation in enumerate(operations)})
    if ordered is None:  # joining made a dependency cycle: do not join at all
        return tuple(_single(operation) for operation in operations)
    return ordered


def _single(operation: Operation) -> Unit:
    return Unit((operation,), operation.op, operation.args, operation.kwargs)


def _join(operations: Sequence[Operation], alone: frozenset[Operation]) -> list[Unit]:
    groups: dict[Any, list[Operation]] = {}
    for operation in operations:
        joinable = operation.group is not None and operation not in alone
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
    """What operations must have in common to be joined: which arguments are tensors, and the keyword arguments."""
    tensors = tuple(isinstance(argument, Value) for argument in operation.args)
    return tensors, tuple(sorted((name, repr(value)) for name, value in operation.kwargs.items()))


def _order(units: Sequence[Unit], position: Mapping[Operation, int]) -> tuple[Unit, ...] | None:
    """A topological order that follows the original order where it can, and for effects; None if there is a cycle."""
    producer = {value: index for index, unit in enumerate(units) for op in unit.operations for value in op.tensors}
    needs = [
        {producer[value] for op in unit.operations for value in op.operands if value in producer} for unit in units
    ]
    effects = [index for index, unit in enumerate(units) if any(o.effect is not None for o in unit.operations)]
    effects.sort(key=lambda index: position[units[index].operations[0]])
    for before, after in itertools.pairwise(effects):
        needs[after].add(before)
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
