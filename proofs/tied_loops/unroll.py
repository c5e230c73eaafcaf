"""A program without its loops: the operations of every trip, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.ir.dataflow import is_read_by_items
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.regions import CARRY, END, ITEM, LOOP, NEXT, STACK

aten = torch.ops.aten

ALIAS = aten.alias.default


@attrs.frozen(eq=False)
class Unrolled:
    """An unrolled program.

    Args:
        graph: the program.
        origins: the value of the program that each value comes from; one that passes a loop's bounds, from what is
            inside of it.
        of_rows: the operations that read rows of stacks, or join rows to them.
    """

    graph: Graph
    origins: Mapping[Value, Value]
    of_rows: Collection[Operation]


def unroll(graph: Graph) -> Unrolled:
    """Unroll all loops of a program, whose lengths are known, and which do not compute with the numbers of trips.

    What is carried passes a `carry` between any two trips, and what is read or left by items an alias.
    """
    unroller = _Unroller(graph)
    unroller.run(graph.operations, {})
    outputs = tuple(unroller.values.get(value, value) for value in graph.outputs)
    constants = (*graph.constants, (unroller.turn, torch.zeros((), dtype=torch.int64)))
    unrolled = attrs.evolve(graph, constants=constants, operations=tuple(unroller.operations), outputs=outputs).verify()
    return Unrolled(unrolled, unroller.origins, unroller.of_rows)


class _Unroller:
    """The operations so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.regions = graph, graph.regions
        self.operations: list[Operation] = []
        self.turn = Value("turn", TensorMeta((), torch.int64))
        """The operand of a `carry` that stands for its loop."""
        self.origins: dict[Value, Value] = {}
        self.values: dict[Value, Value] = {}
        """What stands for a value of the program; within a trip, for one of its body."""
        self.of_rows: list[Operation] = []
        self.rows: dict[Value, dict[int, Value]] = {}
        """The items of stacks that loops make."""

    def run(self, operations: Sequence[Operation], turns: Mapping[Value, int]) -> None:
        """Add operations, and the trips of loops among them; `turns` are the numbers of the trips around them."""
        waiting = deque(operations)
        while waiting:
            operation = waiting.popleft()
            if operation.op is LOOP:
                body = self.regions.inside(operation)
                for _ in body:
                    waiting.popleft()
                self.loop(operation, body, turns)
            elif operation.op is ITEM:
                self.item(operation, turns[operation.args[1]])
            elif operation.op is STACK:
                (y, turn), (stack,) = operation.operands, operation.tensors
                self.rows.setdefault(stack, {})[turns[turn]] = self.named(operation, ALIAS, self.values.get(y, y))
            elif operation.op not in (CARRY, NEXT, END):
                self.add(operation)

    def loop(self, loop: Operation, body: Sequence[Operation], turns: Mapping[Value, int]) -> None:
        """Add all trips of a loop."""
        trips, reverse = loop.args
        carries = self.regions.members(loop, CARRY)
        news = {each.operands[1]: each for each in self.regions.members(loop, NEXT)}
        held = [self.values.get(carry.operands[0], carry.operands[0]) for carry in carries]
        for turn in reversed(range(trips)) if reverse else range(trips):
            for carry, value in zip(carries, held, strict=True):
                self.values[carry.tensors[0]] = self.named(carry, CARRY, value, self.turn)
            self.run(body, {**turns, loop.tensors[0]: turn})
            left = [news[carry.tensors[0]].operands[0] for carry in carries]
            held = [self.values.get(value, value) for value in left]
        for carry, value in zip(carries, held, strict=True):
            self.values[news[carry.tensors[0]].tensors[0]] = self.named(carry, CARRY, value, self.turn)
        for stack in self.regions.members(loop, STACK):
            (result,) = stack.tensors
            rows = [self.rows[result][turn] for turn in range(trips)]
            if not is_read_by_items(self.graph, result):
                joined = self.values[result] = Value(result.name, result.meta)
                self.operations.append(attrs.evolve(stack, op=aten.stack.default, args=(rows, 0), results=(joined,)))
                self.of_rows.append(self.operations[-1])

    def item(self, operation: Operation, turn: int) -> None:
        """Add what reads an item of a stack, which is a list of items if loops alone read it."""
        (xs, _), (result,) = operation.operands, operation.tensors
        if xs in self.rows and xs not in self.values:
            self.values[result] = self.named(operation, ALIAS, self.rows[xs][turn])
        else:
            self.add(attrs.evolve(operation, op=aten.select.int, args=(xs, 0, turn)))
            self.of_rows.append(self.operations[-1])

    def named(self, operation: Operation, op: torch._ops.OpOverload, value: Value, *more: Value) -> Value:
        """Add what names a value anew in the place of an operation of a loop."""
        made = Value(value.name, value.meta)
        self.operations.append(attrs.evolve(operation, op=op, args=(value, *more), results=(made,)))
        self.origins[made] = operation.tensors[0]
        return made

    def add(self, operation: Operation) -> None:
        """Add a copy of an operation."""
        made = {value: Value(value.name, value.meta) for value in operation.tensors}
        copy = operation.with_operands(lambda value: self.values.get(value, value))
        self.operations.append(attrs.evolve(copy, results=tuple(value and made[value] for value in operation.results)))
        self.values |= made
        self.origins |= {new: old for old, new in made.items()}
