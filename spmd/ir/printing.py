"""A rank's program as readable Python: values with dtype, local shape and spec, collectives with their causes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import torch

from spmd.ir.comm import Comm
from spmd.ir.graph import Graph, Operation, Value, numbers_of
from spmd.ir.number import arguments_among

_UNINTERESTING = ("device", "layout", "pin_memory", "memory_format")
"""Keyword arguments that are not printed, because they do not affect the numbers computed."""


_WIDTH = 116
"""Calls longer than this, such as those of list operators, are broken into lines of about this width."""


def operator_name(op: Any) -> str:
    """The short name of an operator or function: `mm` for `aten.mm.default`.

    >>> operator_name(torch.ops.aten._softmax.default)
    'softmax'
    """
    name = op._schema.name if isinstance(op, torch._ops.OpOverload) else getattr(op, "__name__", str(op))
    return str(name).split("::")[-1].lstrip("_")


def program_text(name: str, graph: Graph, header: Sequence[str]) -> str:
    """A rank's program as a Python function.

    Args:
        name: the function's name.
        graph: the program.
        header: lines to print as comments above the function.
    """
    lines, numbers = [f"# {line}" for line in header], arguments_among(numbers_of(graph))
    lines.append(f"def {name}({'' if graph.inputs or numbers else '):'}")
    lines += [f"    {value.name},  # {_description(value, graph)}" for value in graph.inputs]
    lines += [f"    {number.name},  # float" for number in numbers]
    if graph.inputs or numbers:
        lines.append("):")
    lines += [f"    {value.name} = self.{value.name}  # {_description(value, graph)}" for value, _ in graph.constants]
    for operation in graph.operations:
        comm = operation.annotations.comm
        arrow = f"  ← {_remark(comm)}" if comm is not None else ""
        if operation.returns_tuple:
            label = operation.annotations.tuple_name
            lines.append(f"    {label} = {_expression(operation)}  # {len(operation.results)} tensors{arrow}")
            lines += [
                f"    {value.name} = {label}[{index}]  # {_description(value, graph)}"
                for index, value in enumerate(operation.results)
                if value is not None and value in graph.reads
            ]
        else:
            (value,) = operation.tensors
            lines.append(f"    {value.name} = {_expression(operation)}  # {_description(value, graph)}{arrow}")
    return "\n".join([*lines, f"    return {_argument(graph.outputs)}"])


def _remark(comm: Comm) -> str:
    """Why a collective runs, where, and what it sends."""
    where = f" at {comm.source}" if comm.source else ""
    return f"{comm.cause}{where}; {comm.sent}"


def _description(value: Value, graph: Graph) -> str:
    """The dtype, local shape and spec of a value: `f32[4,16] P('data')`."""
    return f"{value.meta} {graph.specs[value]}" if value in graph.specs else str(value.meta)


def _expression(operation: Operation) -> str:
    arguments = [_argument(argument) for argument in operation.args]
    arguments += [f"{key}={_argument(item)}" for key, item in operation.kwargs.items() if key not in _UNINTERESTING]
    flat = f"{operator_name(operation.op)}({', '.join(arguments)})"
    if len(flat) <= _WIDTH:
        return flat
    lines = [
        textwrap.fill(argument, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 9) for argument in arguments
    ]
    return "\n".join([f"{operator_name(operation.op)}(", *(f"{line}," for line in lines), "    )"])


def _argument(argument: Any) -> str:
    if isinstance(argument, Value):
        return argument.name
    if isinstance(argument, tuple):
        items = [_argument(item) for item in argument]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(argument, list):
        return f"[{', '.join(_argument(item) for item in argument)}]"
    return repr(argument)
