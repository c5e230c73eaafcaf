"""Passes over a rank's graph.

Each pass changes a graph in place; `optimize` gives them a copy of their own, so that from outside each run is a pure
function. New nodes carry `meta["val"]`, as those that lowering wrote. No pass adds, drops, merges or moves collectives:
what a plan lists is what runs.
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
"""All passes, in the order in which they run, for programs that are one on all ranks."""

UNEVEN_PASSES: tuple[Pass, ...] = (
    drop_dead_local_nodes,
    merge_reshapes,
    drop_identities,
    share_local_subexpressions,
    drop_dead_local_nodes,
    insert_layout_copies,
)
"""The passes for ranks whose shapes differ. They must run the same primitives, but a view that is one of these ranks'
identities may stand between two primitives of another: no pass may look at shapes and change primitives."""


def optimize(graph: fx.Graph, passes: Sequence[Pass] = PASSES) -> fx.Graph:
    """A copy of the graph after all passes, linted."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for apply in passes:
        apply(copy)
    copy.lint()
    return copy
