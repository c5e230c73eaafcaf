"""Passes over a rank's graph.

Each pass changes a graph in place; `optimize` applies them to a copy. New nodes have `meta["val"]`, like the nodes that
lowering wrote. No pass adds, removes, merges or moves collectives: a program runs exactly those of its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.fx as fx

from spmd.lowering.passes.clean import (
    drop_dead_local_nodes,
    drop_dead_nodes,
    drop_identities,
    merge_reshapes,
    share_common_subexpressions,
    share_local_subexpressions,
)
from spmd.lowering.passes.layouts import insert_layout_copies
from spmd.lowering.passes.shards import shard_factories

Pass = Callable[[fx.Graph], None]

PASSES: tuple[Pass, ...] = (
    drop_dead_nodes,
    merge_reshapes,
    drop_identities,
    shard_factories,
    share_common_subexpressions,
    drop_dead_nodes,
    insert_layout_copies,
)
"""All passes, in the order in which they run, for programs that are identical on all ranks."""

UNEVEN_PASSES: tuple[Pass, ...] = (
    drop_dead_local_nodes,
    merge_reshapes,
    drop_identities,
    share_local_subexpressions,
    drop_dead_local_nodes,
    insert_layout_copies,
)
"""The passes for programs whose local shapes differ between ranks.

All ranks must run the same primitives in the same order, but a view may be an identity on some ranks only. So no pass
may add or remove primitives depending on local shapes."""


def optimize(graph: fx.Graph, passes: Sequence[Pass] = PASSES) -> fx.Graph:
    """Apply passes to a copy of a graph, and lint it.

    Args:
        graph: a rank's graph, which is not changed.
        passes: the passes, in order.

    Returns:
        The optimized copy.
    """
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for apply in passes:
        apply(copy)
    copy.lint()
    return copy
