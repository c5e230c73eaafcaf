"""Python source from a rank's program: straight-line code with almost no overhead beyond the operators that it calls.

In the distributed runtime, where each rank has its own process, the code is a plain function. `spmd.runtime.lockstep`
writes the code of ranks that share a process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from types import MethodType
from typing import Any, TypeAlias

import attrs
import torch

from spmd.collectives.distributed.bucket import Bucket
from spmd.core.generated import define
from spmd.core.own_storage import own_memory
from spmd.core.single_threaded import single_threaded
from spmd.ir.effectful import original
from spmd.ir.graph import Graph, Operation, Value, numbers_of
from spmd.ir.in_place import InPlace, restricted
from spmd.ir.number import Number, in_order
from spmd.ir.operator_kinds import is_composite
from spmd.ir.regions import BOUNDS, LEAVES, MERGE, NEXT, STRUCTURE
from spmd.ir.source import Range
from spmd.job.tracebacks import GENERATED
from spmd.runtime.bindings import callable_of
from spmd.runtime.in_place import call_in_place
from spmd.runtime.outline import outline
from spmd.runtime.ranges import collective_range, common, enter, leave
from spmd.runtime.region_code import RegionCode
from spmd.tracing.source import where

RankProgram: TypeAlias = Callable[..., tuple[Any, ...]]
"""A function of the list of local inputs, which it empties, and of the numbers of a call, if the program takes any; it
returns the tuple of local outputs."""


@attrs.frozen(eq=False)
class Generated:
    """A compiled program and its Python source."""

    function: Callable[..., Any]
    source: str


@single_threaded()
def generate(graph: Graph, *, ranged: bool = False) -> Generated:
    """Compile a rank's program to a function that deletes every variable after its last use.

    Args:
        graph: the program.
        ranged: whether it opens ranges of `torch.profiler`.
    """
    writer = ProgramWriter(graph, ranged)
    inputs = ", ".join(map(writer.variable, graph.inputs))
    writer.lines += ["def program(inputs, numbers=()):", f"    [{inputs}] = inputs", "    inputs.clear()"]
    writer.compute_numbers(graph)
    dying = last_uses(graph, graph.operations)
    free = lambda values: writer.delete(writer.indent, map(writer.variable, values))  # noqa: E731
    free(unused_inputs(graph))
    code = RegionCode(writer, graph, writer.variable, lambda value, _: writer.argument(value), lambda _: None, free)
    for operation in graph.operations:
        if operation.op in STRUCTURE:
            code.write(operation, dying[operation])
            continue
        writer.write(operation, writer.indent, writer.call(operation, dying[operation]))
        free(dying[operation])
    writer.within((), "    ")
    aliases = aliases_of(graph)
    outputs = "".join(f"{writer.argument(value)}{'.clone()' if value in aliases else ''}, " for value in graph.outputs)
    writer.lines.append(f"    return ({outputs})")
    return writer.compiled()


_FILE, _LINES = GENERATED, "origins"


def name_origin(error: BaseException) -> None:
    """Add to the message of an error from a generated program which operator raised it, and the user's line.

    Other errors, and those without a text message, are not changed.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
        trace = trace.tb_next
    if trace is None or not error.args or not isinstance(error.args[0], str):
        return
    origins, lines = trace.tb_frame.f_globals[_LINES], []
    while trace is not None and trace.tb_frame.f_globals.get(_LINES) is origins:
        lines.append(trace.tb_lineno)
        trace = trace.tb_next
    operation = origins.get(tuple(lines))
    if operation is not None:
        tensors = ", ".join(str(operand.meta) for operand in dict.fromkeys(operation.operands))
        op = operation.op.__self__ if isinstance(operation.op, MethodType) else operation.op
        op = original(op) or op
        origin = f"{op} on {tensors} of this rank, at {where(operation.source)}"
        error.args = (f"{error.args[0]}\n  In {origin}.", *error.args[1:])


class ProgramWriter:
    """The source under construction, and the objects that it refers to by name.

    Args:
        graph: the program.
        ranged: whether it opens ranges of `torch.profiler`.
    """

    def __init__(self, graph: Graph, ranged: bool = False) -> None:
        self.lines: list[str] = []
        self.indent = "    "
        self._namespace: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._origins: dict[int, Operation] = {}
        self._variables: dict[Value, str] = {}
        self._constants = dict(graph.constants)
        self._numbers: dict[Number, str] = {}
        self._ranged = ranged
        self._open: tuple[Range, ...] = ()

    def compute_numbers(self, graph: Graph) -> None:
        """Add the lines that compute the numbers which the program's operations take."""
        for number in in_order(numbers_of(graph)):
            arguments = ", ".join(map(self.argument, number.args))
            call = f"numbers[{number.position}]" if number.op is None else f"{self.reference(number.op)}({arguments})"
            self._numbers[number] = f"n{len(self._numbers)}"
            self.lines.append(f"    {self._numbers[number]} = {call}")

    def compiled(self) -> Generated:
        """The program."""
        outlined = outline(self.lines, self._origins)
        self._namespace[_LINES] = outlined.origins
        function = define("program", outlined.lines, self._namespace, _FILE, outlined.parts)
        return Generated(function, "\n".join(outlined.lines))

    def variable(self, value: Value) -> str:
        """The variable of a value."""
        return self._variables.setdefault(value, f"v{len(self._variables)}")

    def write(self, operation: Operation, indent: str, call: str) -> None:
        """Add the lines that assign what a call returns to the variables of an operation's results."""
        self.within_ranges_of(operation, indent)
        self.locate(operation)
        if not operation.returns_tuple:
            self.lines.append(f"{indent}{self.variable(operation.tensors[0])} = {call}")
            return
        self.lines.append(f"{indent}results = {call}")
        for index, value in enumerate(operation.results):
            if value is not None:
                self.lines.append(f"{indent}{self.variable(value)} = results[{index}]")
        self.lines.append(f"{indent}del results")

    def delete(self, indent: str, names: Iterable[str]) -> None:
        """Add the line that deletes variables, if there are any."""
        if found := ", ".join(names):
            self.lines.append(f"{indent}del {found}")

    def ranges_of(self, operation: Operation) -> tuple[Range, ...]:
        """The ranges of an operation: the user's, without a line those of the operation before, and a collective's."""
        user = operation.source.ranges if operation.source else [r for r in self._open if not r.is_collective]
        return (*user, *collective_range(operation))

    def within_ranges_of(self, operation: Operation, indent: str) -> None:
        """Open `within` with the ranges of an operation."""
        if self._ranged:
            self.within(self.ranges_of(operation), indent)

    def within(self, ranges: Sequence[Range], indent: str) -> None:
        """Add the lines that close open ranges which are not among some, and open others."""
        if not self._ranged:
            return
        kept = len(common((self._open, ranges)))
        for number in reversed(range(kept, len(self._open))):
            self.lines.append(f"{indent}{self.reference(leave)}(r{number})")
        for number, opened in enumerate(ranges[kept:], kept):
            self.lines.append(f"{indent}r{number} = {self.reference(enter)}({opened.name!r})")
        self._open = tuple(ranges)

    def locate(self, operation: Operation) -> None:
        """Note that the next line runs an operation, for messages of errors."""
        self._origins[len(self.lines) + 1] = operation

    def call(self, operation: Operation, dying: Container[Value]) -> str:
        """The expression that calls an operation's operator, which may write to operands that die with it."""
        operation = restricted(operation, dying)
        positional = [self.argument(argument) for argument in operation.args]
        if isinstance(operation.op, InPlace) and not operation.op.takes_lists:
            positional[0] = f"[{positional[0]}]"
        keywords = [f"{key}={self.argument(value)}" for key, value in operation.kwargs.items()]
        return f"{self.reference(_callable_of(operation))}({', '.join([*positional, *keywords])})"

    def argument(self, argument: Any, variable: Callable[[Value], str] | None = None) -> str:
        """The expression of an argument; `variable` is that of a value, by default the variable of that name."""
        if isinstance(argument, Value):
            if argument in self._constants:
                return self.reference(self._constants[argument])
            return (variable or self.variable)(argument)
        if isinstance(argument, Number):
            return self._numbers[argument]
        if isinstance(argument, (tuple, list)):
            items = ", ".join(self.argument(item, variable) for item in argument)
            return f"[{items}]" if isinstance(argument, list) else f"({items}{',' if len(argument) == 1 else ''})"
        literal = argument is None or type(argument) in (bool, int, str)  # and no `Handle`
        if literal or (isinstance(argument, float) and math.isfinite(argument)):
            return repr(argument)
        return self.reference(argument)

    def reference(self, target: Any) -> str:
        """The name of a global of the program that holds an operator, a dtype, a tensor, ..."""
        if id(target) not in self._known:
            self._known[id(target)] = f"g{len(self._known)}"
            self._namespace[self._known[id(target)]] = target
        return self._known[id(target)]


def _callable_of(operation: Operation) -> Callable[..., Any]:
    if operation.effect is not None:
        return getattr(operation.op, "_op", operation.op)  # type: ignore[no-any-return]
    call = operation.call()
    if isinstance(call.op, InPlace):
        return call_in_place(call.op, call.args, dict(call.kwargs))
    return callable_of(call.op, call.args, call.kwargs)


def aliases_of(graph: Graph) -> set[Value]:
    """The values that may alias a constant of the program, which the caller must not be able to write to, or a bucket,
    which would be held as a whole.
    """
    found = {value for value, _ in graph.constants}
    for operation in graph.operations:
        exchange = operation.op.__self__ if isinstance(operation.op, MethodType) else None
        in_bucket = isinstance(exchange, Bucket) and exchange.is_shared
        if operation.op in (NEXT, MERGE) and not found.isdisjoint(operation.operands):
            found.update(operation.tensors)
        if in_bucket or (operation.operands and operation.operands[0] in found and _may_alias(operation)):
            found.update(operation.tensors)
    return found


def _may_alias(operation: Operation) -> bool:
    """Whether a result may alias the first operand; composite operators, primitives and functions are assumed to."""
    if operation.op is own_memory:
        return False
    if not isinstance(operation.op, torch._ops.OpOverload) or operation.is_view:
        return True
    return is_composite(operation.op) or operation.op.namespace == "spmd"


def kept_values(graph: Graph) -> set[Value]:
    """The values that no operation frees: outputs and constants."""
    return {*graph.outputs, *(value for value, _ in graph.constants)}


def last_uses(graph: Graph, operations: Sequence[Operation]) -> dict[Operation, list[Value]]:
    """For each operation of a program, the values that can be freed after it.

    Args:
        graph: the program.
        operations: its operations in order of execution.
    """
    regions = graph.regions
    if not regions:
        return last_uses_of(operations, kept_values(graph))
    position = {operation: number for number, operation in enumerate(operations)}
    last: dict[Value, Operation] = {}
    for operation in operations:
        made = regions.leaves(operation) if operation.op in LEAVES else operation
        places = [(value, regions.reads_at(operation, value)) for value in operation.operands]
        for value, place in (*places, *((value, made) for value in operation.tensors)):
            if value not in last or position[place] > position[last[value]]:
                last[value] = place
    kept = kept_values(graph)
    kept.update(value for operation in operations if operation.op in BOUNDS for value in operation.tensors)
    dying: dict[Operation, list[Value]] = {operation: [] for operation in operations}
    for value, place in last.items():
        if value not in kept:
            dying[place].append(value)
    return dying


def last_uses_of(operations: Sequence[Operation], kept: Collection[Value]) -> dict[Operation, list[Value]]:
    """For each of some operations that follow each other, the values that can be freed after it."""
    dying: dict[Operation, list[Value]] = {}
    seen = set(kept)
    for operation in reversed(operations):
        last = [value for value in dict.fromkeys((*operation.operands, *operation.tensors)) if value not in seen]
        dying[operation] = last
        seen.update(last)
    return dying


def unused_inputs(graph: Graph) -> list[Value]:
    """The inputs that no operation and no output uses."""
    return [value for value in graph.inputs if value not in graph.reads]
