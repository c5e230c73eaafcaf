"""A rank's program with its collectives in the order of their launches, those of one launch joined to a bucket.

All ranks launch in the same order, that of the plan, although their programs differ in views that are identities on
some ranks. Views of results move down to their first use, because they wait for the collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from spmd.ir.graph import Graph, Operation, Value


@attrs.frozen(eq=False)
class Joined:
    """The operator of an operation that runs the collectives of a launch, with all their operands and results."""

    operations: tuple[Operation, ...]


def in_launch_order(graph: Graph) -> Graph:
    """The program with its collectives in launch order."""
    return attrs.evolve(graph, operations=tuple(_Order(graph).run())).verify()


class _Order:
    """The operations so far; others wait until collectives are launched, or until their results are needed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.operations: list[Operation] = []
        self.made = {*graph.inputs, *(value for value, _ in graph.constants)}
        self.waiting: dict[Value, Operation] = {}
        """The operations that wait, by their results."""
        self.effects_wait = False
        launches: dict[int, list[Operation]] = {}
        for operation in graph.operations:
            comm = operation.annotations.comm
            if comm is not None:
                launches.setdefault(comm.launch, []).append(operation)
        self.launches = [launches[number] for number in sorted(launches)]
        self.launch_of = {value: n for n, found in enumerate(self.launches) for o in found for value in o.tensors}
        self.launched = 0

    def run(self) -> list[Operation]:
        """All operations in their new order."""
        passed: set[Operation] = set()
        for operation in self.graph.operations:
            if operation.annotations.comm is not None:
                passed.add(operation)
                number = self.launch_of[operation.tensors[0]]
                if passed.issuperset(self.launches[number]):
                    self.launch(number)
            elif self.is_view_of_result(operation) or not self.can_run(operation):
                self.waiting.update(dict.fromkeys(operation.tensors, operation))
            else:
                self.add(operation)
        self.launch(len(self.launches) - 1)
        for operation in dict.fromkeys(self.waiting.values()):
            self.provide(operation.tensors)
        return self.operations

    def is_view_of_result(self, operation: Operation) -> bool:
        """Whether it is a view of the result of a collective, or of such a view."""
        if not isinstance(operation.op, torch._ops.OpOverload) or not operation.is_view:
            return False
        return any(value in self.launch_of or value in self.waiting for value in operation.operands)

    def can_run(self, operation: Operation) -> bool:
        """Make its operands, if that is possible; effects stay in order."""
        if operation.effect is not None and self.effects_wait:
            return False
        found = self.provide(operation.operands)
        self.effects_wait |= operation.effect is not None and not found
        return found

    def provide(self, values: Sequence[Value]) -> bool:
        """Make values, if all that they need has been passed."""
        for value in values:
            if value in self.made:
                continue
            if value in self.launch_of:
                found = self.launch(self.launch_of[value])
            else:
                operation = self.waiting.get(value)
                found = operation is not None and self.provide(operation.operands)
                if operation is not None and found and value not in self.made:
                    self.add(operation)
            if not found:
                return False
        return True

    def launch(self, last: int) -> bool:
        """Launch all collectives up to those of a launch, if that is possible."""
        while self.launched <= last:
            operations = self.launches[self.launched]
            if not self.provide([operand for operation in operations for operand in operation.operands]):
                return False
            self.launched += 1
            self.add(operations[0] if len(operations) == 1 else _joined(operations))
        return True

    def add(self, operation: Operation) -> None:
        self.operations.append(operation)
        self.made.update(operation.tensors)


def _joined(operations: Sequence[Operation]) -> Operation:
    """One operation that runs the collectives of a launch."""
    return attrs.evolve(
        operations[0],
        op=Joined(tuple(operations)),
        args=tuple(operation.operands[0] for operation in operations),
        results=tuple(operation.tensors[0] for operation in operations),
    )
