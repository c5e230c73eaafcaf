"""Python source of loops and branches: `for`, `while` and `if` of generated programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from spmd.errors import SpmdError
from spmd.ir.dataflow import is_read_by_items
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.regions import (
    BEGINS,
    BOUNDS,
    BRANCH,
    CARRY,
    END,
    GIVE,
    ITEM,
    LOOP,
    MERGE,
    NEXT,
    OTHERWISE,
    PROCEED,
    STACK,
)


class Writer(Protocol):
    """The source under construction."""

    lines: list[str]
    indent: str

    def reference(self, target: object) -> str:
        """The name of a global of the program that holds an object."""

    def within(self, ranges: Sequence[Any], indent: str) -> None:
        """Close and open ranges of the profiler."""


class RegionCode:
    """Writes the statements of loops and branches.

    Args:
        writer: has the lines.
        graph: the program.
        name: the variable of a value, which may hold a list with an item for each instance.
        given: the expression of a value with the instances of another.
        each: the number of instances of a value; None if its variable is no list.
        free: adds the line that deletes values.
    """

    def __init__(
        self,
        writer: Writer,
        graph: Graph,
        name: Callable[[Value], str],
        given: Callable[[Value, Value], str],
        each: Callable[[Value], int | None],
        free: Callable[[Sequence[Value]], None],
    ) -> None:
        self.writer, self.graph, self.name, self.given, self.each, self.free = writer, graph, name, given, each, free
        self.regions = graph.regions
        self.count = 0
        self.turns: dict[Value, str] = {}
        self.histories = _histories(graph)

    def line(self, text: str) -> None:
        """Add a line."""
        self.writer.lines.append(f"{self.writer.indent}{text}")

    def write(self, operation: Operation, dying: Sequence[Value]) -> None:
        """Add the lines of an operation that calls one of `STRUCTURE`; `dying` are the values to be freed after it."""
        write: Mapping[object, Callable[[Operation], None]] = {
            BRANCH: self.branch, OTHERWISE: self.otherwise, PROCEED: self.proceed, CARRY: lambda _: None,
            ITEM: self.item, NEXT: self.next, STACK: self.stack, GIVE: self.give, MERGE: self.merge,
        }  # fmt: skip
        if operation.op in BOUNDS:
            self.writer.within((), self.writer.indent)
        if operation.op in BEGINS and operation.op is not BRANCH:
            self.loop(operation, dying)
            return
        if operation.op is END:
            self.end(operation, dying)
            return
        write[operation.op](operation)
        self.free(dying)

    def loop(self, operation: Operation, dying: Sequence[Value]) -> None:
        """The head of a loop."""
        for carry in self.regions.members(operation, CARRY):
            (made,) = carry.tensors
            self.line(f"{self.name(made)} = {self.given(carry.operands[0], made)}")
        for stack in self.regions.members(operation, STACK):
            count = self.each(stack.tensors[0])
            self.line(f"{self._kept(stack.tensors[0])} = {'[]' if count is None else f'[[] for _ in range({count})]'}")
        self.free(dying)
        turn = self.turns[operation.tensors[0]] = f"t{self.count}"
        self.count += 1
        if operation.op is LOOP:
            trips, reverse = operation.args
            self.line(f"for {turn} in {f'reversed(range({trips}))' if reverse else f'range({trips})'}:")
        else:
            self.line("while True:")
        self.writer.indent += "    "
        self.line("pass")

    def proceed(self, operation: Operation) -> None:
        """The test of a loop."""
        self.line(f"if not {self._truth(operation.operands[0])}:")
        self.line("    break")

    def end(self, operation: Operation, dying: Sequence[Value]) -> None:
        """The end of a loop or a branch; what dies is freed before stacks are joined."""
        begin = self.graph.producers[operation.operands[0]]
        nexts, stacks = self.regions.members(begin, NEXT), self.regions.members(begin, STACK)
        if nexts:
            carries, new = ([variable(o.operands[1]) for o in nexts] for variable in (self.name, self._next))
            self.line(f"{', '.join(carries)} = {', '.join(new)}")
            self.line(f"del {', '.join(new)}")
        self.writer.indent = self.writer.indent[:-4]
        for one in nexts:
            self.line(f"{self.name(one.tensors[0])} = {self.given(one.operands[1], one.tensors[0])}")
        self.free([one.operands[1] for one in nexts])
        results = [stack.tensors[0] for stack in stacks if stack.tensors[0] not in self.histories]
        self.free([value for value in dying if value not in results])
        for result in results:
            self._join(result, begin.args[1])
        self.free([value for value in dying if value in results])

    def _join(self, result: Value, reverse: bool) -> None:
        kept, meta = self._kept(result), self.writer.reference((result.meta.shape, result.meta.dtype))
        join = self.writer.reference(joined)
        if self.each(result) is None:
            self.line(f"{self.name(result)} = {join}({kept}, {reverse}, {meta})")
        else:
            self.line(f"{self.name(result)} = [{join}(parts, {reverse}, {meta}) for parts in {kept}]")
        self.line(f"del {kept}")

    def item(self, operation: Operation) -> None:
        """An item of a stack."""
        xs, turn = operation.operands
        (x,) = operation.tensors
        place = self.turns[turn]
        if xs in self.histories:
            trips, reverse = self.histories[xs]
            take = f"[{trips - 1} - {place}]" if reverse else f"[{place}]"
        else:
            take = f".select(0, {place})"
        if self.each(x) is None:
            self.line(f"{self.name(x)} = {self.given(xs, x)}{take}")
        else:
            self.line(f"{self.name(x)} = [each{take} for each in {self.given(xs, x)}]")

    def next(self, operation: Operation) -> None:
        """What a carry is in the next trip."""
        new, carry = operation.operands
        self.line(f"{self._next(carry)} = {self.given(new, carry)}")

    def stack(self, operation: Operation) -> None:
        """What a trip adds to a stack."""
        (result,) = operation.tensors
        kept, y = self._kept(result), self.given(operation.operands[0], result)
        if self.each(result) is None:
            self.line(f"{kept}.append({y})")
        else:
            self.line(f"for parts, each in zip({kept}, {y}):")
            self.line("    parts.append(each)")
            self.line("del parts, each")

    def branch(self, operation: Operation) -> None:
        """The head of a branch."""
        for give in self.regions.of_sides(operation, GIVE):
            self.line(f"{self.name(give.tensors[0])} = None")
        self.line(f"if {self._truth(operation.operands[0])}:")
        self.writer.indent += "    "
        self.line("pass")

    def otherwise(self, _: Operation) -> None:
        """The second side."""
        self.writer.indent = self.writer.indent[:-4]
        self.line("else:")
        self.writer.indent += "    "
        self.line("pass")

    def give(self, operation: Operation) -> None:
        """A result of a side."""
        (result,) = operation.tensors
        self.line(f"{self.name(result)} = {self.given(operation.operands[0], result)}")

    def merge(self, operation: Operation) -> None:
        """A result of a branch."""
        first, second = operation.operands
        (result,) = operation.tensors
        one, other = self.given(first, result), self.given(second, result)
        self.line(f"{self.name(result)} = {one} if {self.name(first)} is not None else {other}")

    def _truth(self, predicate: Value) -> str:
        value = self.given(predicate, predicate)
        return value if self.each(predicate) is None else f"{self.writer.reference(agreed)}({value})"

    def _kept(self, result: Value) -> str:
        """The list of what trips add to a stack."""
        return self.name(result) if result in self.histories else f"{self.name(result)}_parts"

    def _next(self, carry: Value) -> str:
        return f"{self.name(carry)}_next"


def agreed(predicates: Sequence[torch.Tensor]) -> bool:
    """The value of a predicate whose instances lead all ranks the same way: they meet in the body."""
    values = set(map(bool, predicates))
    if len(values) > 1:
        raise SpmdError(
            "A predicate differs between virtual ranks that communicate in the body of a loop or a branch. Make it one "
            "for all: of spmd.collectives.pmax or psum."
        )
    return values.pop()


def joined(parts: list[torch.Tensor], reverse: bool, meta: tuple[Sequence[int], torch.dtype]) -> torch.Tensor:
    """The stack of what trips have made, in the order of items; of no trip an empty tensor."""
    if not parts:
        shape, dtype = meta
        return torch.empty(shape, dtype=dtype)
    return torch.stack(parts[::-1] if reverse else parts)


def _histories(graph: Graph) -> dict[Value, tuple[int, bool]]:
    """The stacks that only loops read, item by item: lists, which nothing copies. With the length and the direction."""
    found: dict[Value, tuple[int, bool]] = {}
    for operation in graph.operations:
        if operation.op is STACK:
            (value,) = operation.tensors
            if is_read_by_items(graph, value):
                _, reverse = graph.producers[operation.operands[1]].args
                found[value] = (operation.args[2], reverse)
    return found
