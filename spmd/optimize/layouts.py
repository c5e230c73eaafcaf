"""The pass that gives layout-sensitive kernels the memory that they need."""

from __future__ import annotations

import torch.fx as fx

from spmd.rules.layouts import LAYOUT_COPIES, Need, need


def insert_layout_copies(graph: fx.Graph) -> None:
    """Before an operator that reads its operands by stride, make them contiguous, or their rows.

    Local strides depend on the plan and on what the caller's shards are, so whether to copy is decided when it runs: a
    tensor that has the layout stays what it is.
    """
    made: dict[tuple[fx.Node, Need], fx.Node] = {}
    for node in list(graph.nodes):
        needed = need(node.target) if node.op == "call_function" else Need.ANY
        if needed is Need.ANY:
            continue
        for operand in node.all_input_nodes:
            if _lacks(operand, needed):
                if (operand, needed) not in made:
                    made[operand, needed] = _insert(graph, node, operand, needed)
                node.replace_input_with(operand, made[operand, needed])


def _lacks(operand: fx.Node, needed: Need) -> bool:
    """Whether an operand may have another layout; numbers have none, and what a copy gives has it."""
    return operand.target is not LAYOUT_COPIES[needed] and operand.meta["val"].ndim > 0


def _insert(graph: fx.Graph, before: fx.Node, operand: fx.Node, needed: Need) -> fx.Node:
    with graph.inserting_before(before):
        copy = graph.create_node(
            "call_function", LAYOUT_COPIES[needed], (operand,), name=f"{operand.name}_{needed.value}"
        )
    copy.meta = {key: value for key, value in operand.meta.items() if key in ("val", "spec", "source")}
    return copy
