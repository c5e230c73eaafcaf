"""Rewrites a traced program with few kinds of operators, so that few sharding rules are needed.

A canonical program has

* no list operators: their elements are operations that share a group (`spmd.ir.list_operators`);
* no means: each is a sum and a division (`decompositions`);
* no computation whose result is known to be one number everywhere (`constant_folding`);
* no flip before and after a scan: it is one from the end (`scans`);
* one form for operations that mean the same (`normal_forms`, `joined_pads`). `view.default` is any change of
  shape, and copies where strides require it, as `torch.reshape` does: strides are not part of a program;
* nothing in a loop that is the same in every trip (`invariants`);
* no identity operations, no common subexpressions and no dead code. A copy to contiguous memory counts as an identity:
  lowering inserts the copies that a kernel needs (`spmd.rules.layouts`). A copy to channels-last memory stays.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from spmd.ir.graph import Graph
from spmd.ir.list_operators import split_lists
from spmd.ir.simplify import eliminate_dead, simplify
from spmd.tracing.canonicalize.constant_folding import fold_constants
from spmd.tracing.canonicalize.decompositions import DECOMPOSITIONS, decompose_operations, expand_operations
from spmd.tracing.canonicalize.invariants import move_invariants
from spmd.tracing.canonicalize.joined_pads import join_pads
from spmd.tracing.canonicalize.normal_forms import normalize
from spmd.tracing.canonicalize.scans import join_scans

OpOverload = torch._ops.OpOverload

_ROUNDS = 8  # how often decompositions are decomposed further; torch's are at most four levels deep


def canonicalize(graph: Graph, decompose: Callable[[OpOverload], bool] | None = None) -> Graph:
    """The canonical form of a program: it computes the same values with fewer kinds of operators.

    Args:
        graph: a traced program.
        decompose: whether an operator has no sharding rule and needs decomposing. torch's decompositions are applied
            to such operators, also to those in the decompositions. None applies only `DECOMPOSITIONS`.

    Returns:
        The canonical program, verified.
    """
    if graph.variants is not None:
        graph = attrs.evolve(graph, variants=graph.variants.map(lambda other: canonicalize(other, decompose)))
    graph = _run_passes(graph)
    for _ in range(_ROUNDS if decompose is not None else 0):
        simpler = decompose_operations(graph, decompose)  # type: ignore[arg-type]
        if simpler.operations == graph.operations:
            break
        graph = _run_passes(simpler)
    return graph.verify()


def _run_passes(graph: Graph) -> Graph:
    for run in PASSES:
        graph = run(graph)
    return graph


def expand_known(graph: Graph) -> Graph:
    """Replace the operators in `DECOMPOSITIONS` by their decompositions, repeatedly."""
    for _ in range(_ROUNDS):
        simpler = expand_operations(graph, lambda operation: DECOMPOSITIONS.get(operation.op))
        if simpler.operations == graph.operations:
            return graph
        graph = simpler
    return graph


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    expand_known,
    split_lists,
    normalize,
    join_pads,
    fold_constants,
    simplify,
    join_scans,
    eliminate_dead,
    move_invariants,
)
"""The passes in order of execution; dead code is removed last, because the other passes create it."""
