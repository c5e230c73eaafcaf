"""The pass that creates constant tensors directly as shards."""

from __future__ import annotations

import torch
import torch.fx as fx


def shard_factories(graph: fx.Graph) -> None:
    """Replace a shard of an `aten.full` by an `aten.full` of the shard's shape."""
    for node in list(graph.nodes):
        if node.target is torch.ops.spmd.shard.default and node.args[0].target is torch.ops.aten.full.default:
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
