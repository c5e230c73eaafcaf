"""Passes over the program of a rank.

No pass adds, removes, merges or moves operations with effects: a program runs exactly the collectives of its plan.
Imports `plan.local` and what is below it; `lowering` imports it.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.ir.graph import Graph
from spmd.ir.simplify import eliminate_dead, simplify
from spmd.lowering.passes.layouts import insert_layout_copies
from spmd.lowering.passes.shards import shard_factories


def simplify_local(graph: Graph) -> Graph:
    """`simplify` for local tensors, whose dims no sharding refers to."""
    return simplify(graph, any_shapes=True)


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    eliminate_dead,
    simplify_local,
    shard_factories,
    eliminate_dead,
    insert_layout_copies,
)
"""The passes in order of execution. `shard_factories` sees shards of constants when reshapes of both are removed."""
