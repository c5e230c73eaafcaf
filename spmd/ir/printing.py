"""A rank's program as readable Python: values with dtype, local shape and spec, collectives with their causes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import torch

from spmd.core.folded_lines import fold_lines
from spmd.ir.comm import Comm
from spmd.ir.graph import Graph, Operation, Value, numbers_of
from spmd.ir.number import arguments_among
from spmd.ir.regions import (
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
    WHILE,
)

_UNINTERESTING = ("device", "layout", "pin_memory", "memory_format")
"""Keyword arguments that are not printed, because they do not affect the numbers computed."""


_WIDTH = 116
"""Calls longer than this, such as those of list operators, are broken into lines of about this width."""


_MANY = 64
"""Lists of more items than this are printed with a line for each."""


def operator_name(op: Any) -> str:
    """The short name of an operator or function: `mm` for `aten.mm.default`.

    >>> operator_name(torch.ops.aten._softmax.default)
    'softmax'
    """
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else getattr(op, "__name__", str(op))
    return str(name).split("::")[-1].lstrip("_")


def program_text(name: str, graph: Graph, header: Sequence[str], fold: bool = True) -> str:
    """A rank's program as a Python function.

    Args:
        name: the function's name.
        graph: the program.
        header: lines to print as comments above the function.
        fold: whether repeated lines, as those of equal layers, are printed once.
    """
    lines, numbers = [f"# {line}" for line in header], arguments_among(numbers_of(graph))
    lines.append(f"def {name}({'' if graph.inputs or numbers else '):'}")
    lines += [f"    {value.name},  # {_description(value, graph)}" for value in graph.inputs]
    lines += [f"    {number.name},  # float" for number in numbers]
    if graph.inputs or numbers:
        lines.append("):")
    lines += [f"    {value.name} = self.{value.name}  # {_description(value, graph)}" for value, _ in graph.constants]
    statements = _Statements(graph)
    for operation in graph.operations:
        lines += statements.of(operation)
    lines.append(_item_by_item("return ", graph.outputs, "    ") or f"    return {_argument(graph.outputs)}")
    return "\n".join(fold_lines("\n".join(lines).splitlines()) if fold else lines)


class _Statements:
    """The statements of operations, indented as they stand in loops and branches."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.indent = graph, "    "

    def of(self, operation: Operation) -> list[str]:
        """The lines of an operation; those of a loop or a branch are for its bounds and what passes them."""
        write = {
            LOOP: self.loop, WHILE: self.loop, PROCEED: self.proceed, BRANCH: self.branch, OTHERWISE: self.otherwise,
            END: self.end, ITEM: self.item, STACK: self.stack, GIVE: self.give,
        }.get(operation.op)  # fmt: skip
        if write is not None:
            return write(operation)
        return [] if operation.op in (CARRY, NEXT, MERGE) else self.call(operation)

    def call(self, operation: Operation) -> list[str]:
        """A call of an operator."""
        comm = operation.annotations.comm
        arrow = f"  ← {_remark(comm)}" if comm is not None else ""
        expression = _expression(operation, self.indent)
        if not operation.returns_tuple:
            return [self.line(operation.tensors[0], expression, arrow)]
        label = operation.annotations.tuple_name
        return [
            f"{self.indent}{label} = {expression}  # {len(operation.results)} tensors{arrow}",
            *(
                self.line(value, f"{label}[{index}]")
                for index, value in enumerate(operation.results)
                if value is not None and value in self.graph.reads
            ),
        ]

    def line(self, value: Value, expression: str, remark: str = "") -> str:
        """The line that assigns an expression to the variable of a value."""
        return f"{self.indent}{value.name} = {expression}  # {_description(value, self.graph)}{remark}"

    def loop(self, operation: Operation) -> list[str]:
        """The beginning of a loop."""
        regions = self.graph.regions
        lines = [self.line(o.tensors[0], o.operands[0].name) for o in regions.members(operation, CARRY)]
        lines += [self.line(o.tensors[0], "[]") for o in regions.members(operation, STACK)]
        if operation.op is LOOP:
            trips, reverse = operation.args
            turns = f"reversed(range({trips}))" if reverse else f"range({trips})"
            lines.append(f"{self.indent}for {operation.tensors[0].name} in {turns}:")
        else:
            lines.append(f"{self.indent}while True:")
        self.indent += "    "
        return lines

    def proceed(self, operation: Operation) -> list[str]:
        """The test of a loop."""
        return [f"{self.indent}if not {operation.operands[0].name}:", f"{self.indent}    break"]

    def branch(self, operation: Operation) -> list[str]:
        """The beginning of a branch."""
        line = f"{self.indent}if {operation.operands[0].name}:"
        self.indent += "    "
        return [line, *self.nothing(operation)]

    def otherwise(self, operation: Operation) -> list[str]:
        """The beginning of its second side."""
        return [f"{self.indent[:-4]}else:", *self.nothing(operation)]

    def nothing(self, opens: Operation) -> list[str]:
        """What stands in a side without operations."""
        return [] if self.graph.regions.members(opens) else [f"{self.indent}pass"]

    def end(self, operation: Operation) -> list[str]:
        """The end of a loop, and what it leaves; of a branch, nothing."""
        regions, begin = self.graph.regions, self.graph.producers[operation.operands[0]]
        if begin.op is BRANCH:
            self.indent = self.indent[:-4]
            return []
        nexts, lines = regions.members(begin, NEXT), []
        if nexts:
            carries, new = (", ".join(o.operands[position].name for o in nexts) for position in (1, 0))
            lines.append(f"{self.indent}{carries} = {new}")
        elif not regions.members(begin):
            lines.append(f"{self.indent}pass")
        self.indent = self.indent[:-4]
        lines += [self.line(o.tensors[0], o.operands[1].name) for o in nexts]
        order = "[::-1]" if begin.op is LOOP and begin.args[1] else ""
        stacks = [o.tensors[0] for o in regions.members(begin, STACK)]
        return lines + [self.line(value, f"torch.stack({value.name}{order})") for value in stacks]

    def item(self, operation: Operation) -> list[str]:
        """An item of a stack."""
        xs, turn = operation.operands
        return [self.line(operation.tensors[0], f"{xs.name}[{turn.name}]")]

    def stack(self, operation: Operation) -> list[str]:
        """What a trip adds to a stack."""
        return [f"{self.indent}{operation.tensors[0].name}.append({operation.operands[0].name})"]

    def give(self, operation: Operation) -> list[str]:
        """A result of one side of a branch: that of both. One value may be several results."""
        merges = self.graph.consumers[operation.tensors[0]]
        return [self.line(merge.tensors[0], operation.operands[0].name) for merge in merges]


def _remark(comm: Comm) -> str:
    """Why a collective runs, where, and what it sends."""
    where = f" at {comm.source}" if comm.source else ""
    return f"{comm.cause}{where}; {comm.sent}"


def _description(value: Value, graph: Graph) -> str:
    """The dtype, local shape and spec of a value: `f32[4,16] P('data')`."""
    return f"{value.meta} {graph.specs[value]}" if value in graph.specs else str(value.meta)


def _expression(operation: Operation, indent: str) -> str:
    shown = [("", argument) for argument in operation.args]
    shown += [(f"{key}=", item) for key, item in operation.kwargs.items() if key not in _UNINTERESTING]
    texts = [f"{key}{_argument(argument)}" for key, argument in shown]
    flat = f"{operator_name(operation.op)}({', '.join(texts)})"
    if len(flat) <= _WIDTH:
        return flat
    inner = f"{indent}    "
    lines = [
        _item_by_item(key, argument, inner)
        or textwrap.fill(text, _WIDTH, initial_indent=inner, subsequent_indent=f"{inner} ")
        for (key, argument), text in zip(shown, texts, strict=True)
    ]
    return "\n".join([f"{operator_name(operation.op)}(", *(f"{line}," for line in lines), f"{indent})"])


def _item_by_item(key: str, argument: Any, indent: str) -> str | None:
    """A long list with a line for each item, so that those of equal layers are found; None for what is none."""
    if not isinstance(argument, (list, tuple)) or len(argument) <= _MANY:
        return None
    begin, end = "[]" if isinstance(argument, list) else "()"
    return "\n".join([f"{indent}{key}{begin}", *(f"{indent}    {_argument(item)}," for item in argument), indent + end])


def _argument(argument: Any) -> str:
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, tuple):
        items = [_argument(item) for item in argument]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(argument, list):
        return f"[{', '.join(_argument(item) for item in argument)}]"
    return repr(argument)
