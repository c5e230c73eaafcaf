"""A lowered program as readable Python: values with dtype, local shape and spec, collectives with their causes."""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

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


def program_text(
    name: str, graph: fx.Graph, header: Sequence[str], communication: Callable[[fx.Node], str | None]
) -> str:
    """A graph as a Python function.

    Args:
        name: the function's name.
        graph: a lowered graph; nodes have `meta["val"]` and, where it is known, `meta["spec"]`.
        header: lines to print as comments above the function.
        communication: returns the comment for a collective, and None for any other node.
    """
    lines = [f"# {line}" for line in header]
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    lines.append(f"def {name}({'' if placeholders else '):'}")
    lines += [f"    {node.name},  # {describe(node)}" for node in placeholders]
    if placeholders:
        lines.append("):")
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return {_argument(node.args[0])}")
        elif node.op != "placeholder":
            remark = communication(node)
            arrow = f"  ← {remark}" if remark else ""
            lines.append(f"    {node.name} = {_expression(node)}  # {describe(node)}{arrow}")
    return "\n".join(lines)


def describe(node: fx.Node) -> str:
    """The dtype, local shape and spec of a node's value: `f32[4,16] P('data')`; for a tuple, the number of tensors."""
    value = node.meta["val"]
    if isinstance(value, tuple):
        return f"{len(value)} tensors"
    return f"{value} {node.meta['spec']}" if "spec" in node.meta else str(value)


def _expression(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{_argument(node.args[0])}[{node.args[1]}]"
    arguments = [_argument(argument) for argument in node.args]
    arguments += [f"{key}={_argument(item)}" for key, item in node.kwargs.items() if key not in _UNINTERESTING]
    flat = f"{operator_name(node.target)}({', '.join(arguments)})"
    if len(flat) <= _WIDTH:
        return flat
    lines = [
        textwrap.fill(argument, _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 9) for argument in arguments
    ]
    return "\n".join([f"{operator_name(node.target)}(", *(f"{line}," for line in lines), "    )"])


def _argument(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, tuple):
        items = [_argument(item) for item in argument]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(argument, (list, fx.immutable_collections.immutable_list)):
        return f"[{', '.join(_argument(item) for item in argument)}]"
    return repr(argument)
