"""Passes that make less than a whole tensor where only a shard is wanted."""

from __future__ import annotations

import torch
import torch.fx as fx

_ALL_REDUCE, _REDUCE_SCATTER, _SHARD = "spmd::all_reduce", "spmd::reduce_scatter", "spmd::shard"


def shard_factories(graph: fx.Graph) -> None:
    """A shard of `full` is a smaller `full`."""
    for node in list(graph.nodes):
        if _calls(node, _SHARD) and node.args[0].target is torch.ops.aten.full.default:
            full = node.args[0]
            with graph.inserting_before(node):
                smaller = graph.create_node(
                    "call_function",
                    full.target,
                    (list(node.meta["val"].shape), *full.args[1:]),
                    dict(full.kwargs),
                    name=full.name,
                )
            smaller.meta.update(node.meta)
            node.replace_all_uses_with(smaller)
            graph.erase_node(node)


def scatter_reductions(graph: fx.Graph) -> None:
    """An all_reduce of which each rank only reads its own shard is a reduce_scatter.

    Where the shard spans some of the reduced axes, the rest is all-reduced afterwards, on the smaller tensor.
    """
    for node in list(graph.nodes):
        if not (_calls(node, _SHARD) and _calls(node.args[0], _ALL_REDUCE) and len(node.args[0].users) == 1):
            continue
        reduction, (_, dim, size, axes) = node.args[0], node.args
        operand, op, reduced = reduction.args
        if not set(axes) <= set(reduced):
            continue
        with graph.inserting_before(node):
            scattered = graph.create_node(
                "call_function",
                torch.ops.spmd.reduce_scatter.default,
                (operand, op, dim, size, axes),
                name="reduce_scatter_1",
            )
            scattered.meta = {**reduction.meta, **{key: node.meta[key] for key in ("val", "spec") if key in node.meta}}
            rest = [axis for axis in reduced if axis not in axes]
            result = scattered
            if rest:
                result = graph.create_node(
                    "call_function", reduction.target, (scattered, op, rest), name="all_reduce_1"
                )
                result.meta = dict(scattered.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        graph.erase_node(reduction)


def _calls(node: object, name: str) -> bool:
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return schema is not None and schema.name == name
