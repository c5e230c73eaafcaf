"""A peephole optimisation: a reduction whose result is only sharded becomes one redistribution instead of two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from spmd.collectives.resharding import redistribution
from spmd.collectives.traffic import StepKind
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE


def scatter_reductions(graph: Graph, specs: Mapping[Value, DTensorSpec]) -> Graph:
    """Join every redistribution that only reduces with its only consumer, if that only shards along the reduced axes.

    Constraints produce such pairs, as `reshard(reshard(x, P()), P("model"))`. A reduce_scatter sends half the bytes of
    an all_reduce.

    Args:
        graph: a program with its redistributions as explicit operations.
        specs: the spec of every value.

    Returns:
        The program with the pairs joined.
    """
    users = Counter(value for operation in graph.operations for value in operation.operands)
    users.update(graph.outputs)
    moves = {operation.tensors[0]: operation for operation in graph.operations if operation.op is REDISTRIBUTE}
    joined: dict[Operation, Operation] = {}
    for shard in moves.values():
        reduction = moves.get(shard.operands[0])
        if reduction is None or users[shard.operands[0]] > 1 or not _is_scattered(reduction, shard, specs):
            continue
        joined[reduction] = attrs.evolve(reduction, results=shard.results)
        joined[shard] = joined[reduction]
    operations = dict.fromkeys(joined.get(operation, operation) for operation in graph.operations)
    return attrs.evolve(graph, operations=tuple(operations))


def _is_scattered(reduction: Operation, shard: Operation, specs: Mapping[Value, DTensorSpec]) -> bool:
    partial, whole, result = (specs[value] for value in (*reduction.operands, *shard.operands, *shard.tensors))
    reduced = {axis for step in redistribution(partial, whole) for axis in step.axes}
    return (
        all(step.kind is StepKind.ALL_REDUCE for step in redistribution(partial, whole))
        and all(step.kind is StepKind.SHARD for step in redistribution(whole, result))
        and reduced.issuperset(axis for step in redistribution(whole, result) for axis in step.axes)
    )
