"""Peephole passes: they remove dead nodes, common subexpressions, identity views and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from spmd.collectives.primitives import COLLECTIVES
from spmd.ir.random_operators import is_random

aten = torch.ops.aten

_VIEWS = (aten.reshape.default, aten.expand.default)
"""Operators that return their first argument when the shape stays the same."""

_COPIES = (aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default)
"""Operators that return the value of their argument: a functional program needs no copies."""


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Remove dead nodes.

    Placeholders stay, and so do random operators, which advance the generator, and collectives, which run as planned.
    """
    _drop_dead(
        graph, lambda node: node.op in ("placeholder", "output") or is_random_node(node) or node.target in COLLECTIVES
    )


def drop_dead_local_nodes(graph: fx.Graph) -> None:
    """As `drop_dead_nodes`, but all primitives stay: another rank may need their results."""
    _drop_dead(graph, lambda node: node.op in ("placeholder", "output") or is_random_node(node) or _is_primitive(node))


def _drop_dead(graph: fx.Graph, keep: Callable[[fx.Node], bool]) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and not keep(node):
            graph.erase_node(node)


def drop_identities(graph: fx.Graph) -> None:
    """Remove copies, views and `pcast`s whose result has the shape and dtype of their operand."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = bool(node.args) and isinstance(node.args[0], fx.Node) and node.args[0].meta["val"] == node.meta["val"]
        keeps_layout = node.kwargs.get("memory_format") not in (torch.channels_last, torch.channels_last_3d)
        if same and keeps_layout and (node.target in _VIEWS or node.target in _COPIES or _is_pcast(node)):
            _replace(graph, node, node.args[0])


def _is_pcast(node: fx.Node) -> bool:
    """Whether a node is a `pcast`, which marks a value as varying over mesh axes and computes nothing."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name == "spmd::pcast"


def merge_reshapes(graph: fx.Graph) -> None:
    """Replace a reshape of a reshape by one reshape."""
    for node in graph.nodes:
        while node.target is aten.reshape.default and node.args[0].target is aten.reshape.default:
            node.args = (node.args[0].args[0], *node.args[1:])


def share_common_subexpressions(graph: fx.Graph) -> None:
    """Compute equal calls once (common subexpression elimination).

    Programs are functional, so calls with equal arguments have equal results. Exceptions are random operators; and
    collectives and rematerializations (`meta["repetition"]`), which run as often as the plan says.
    """
    _share(graph, lambda node: node.op in ("call_function", "get_attr") and node.target not in COLLECTIVES)


def share_local_subexpressions(graph: fx.Graph) -> None:
    """As `share_common_subexpressions`, but every call of a primitive stays, so that all ranks run the same ones."""
    _share(graph, lambda node: node.op in ("call_function", "get_attr") and not _is_primitive(node))


def _share(graph: fx.Graph, eligible: Callable[[fx.Node], bool]) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in filter(eligible, list(graph.nodes)):
        if is_random_node(node):
            continue
        key = (node.op, node.target, _hashable(node.args), _hashable(node.kwargs), node.meta.get("repetition"))
        first = seen.setdefault(key, node)
        if first is not node:
            _replace(graph, node, first)


def is_random_node(node: fx.Node) -> bool:
    """Whether a node calls a random operator."""
    return node.op == "call_function" and is_random(node.target, node.args, node.kwargs)


def _is_primitive(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "spmd"


def _hashable(argument: Any) -> Any:
    """An argument as a dict key; it includes the type, because `1 == 1.0 == True`."""
    if isinstance(argument, (list, tuple)):
        return tuple(_hashable(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(argument.items()))
    return argument if isinstance(argument, fx.Node) else (type(argument), repr(argument))


def _replace(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    if "spec" in node.meta and "spec" not in other.meta:
        other.meta["spec"] = node.meta["spec"]
    node.replace_all_uses_with(other)
    graph.erase_node(node)
