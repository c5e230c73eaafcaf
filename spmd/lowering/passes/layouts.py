"""The pass that inserts copies for kernels that need operands in a certain memory layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from spmd.rules.layouts import Need, lay_out


def insert_layout_copies(graph: fx.Graph) -> None:
    """Insert `contiguous` or `rows` before operators whose kernels need an operand in that memory layout.

    Local strides depend on the plan and on the shards that the caller passes, so whether to copy is decided at run
    time: a tensor that already has the layout is returned as it is.
    """
    made: dict[tuple[fx.Node, Need], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue

        def copy(leaf: Any, needed: Need, node: fx.Node = node) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            if (leaf, needed) not in made:
                made[leaf, needed] = _insert(graph, node, leaf, needed)
            return made[leaf, needed]

        node.args, node.kwargs = lay_out(node.target, node.args, node.kwargs, copy)


def _insert(graph: fx.Graph, before: fx.Node, operand: fx.Node, needed: Need) -> fx.Node:
    with graph.inserting_before(before):
        name = f"{operand.name}_{needed.name.lower()}"
        copy = graph.create_node("call_function", COPIES[needed], (operand,), name=name)
    copy.meta = {key: value for key, value in operand.meta.items() if key in ("val", "spec", "source")}
    return copy


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor if it is contiguous and starts at storage offset 0, else a copy that is."""
    return Need.CONTIGUOUS.lay_out(x)


def rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor if its last dim has stride 1, else a contiguous copy."""
    return Need.ROWS.lay_out(x)


COPIES = {Need.CONTIGUOUS: contiguous, Need.ROWS: rows}
