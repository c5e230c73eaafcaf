"""A peephole optimisation: two redistributions in a row become one, where that is not slower."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import attrs

from spmd.collectives.primitives import ALL_GATHER, ALL_REDUCE, SHARD
from spmd.collectives.resharding import redistribution
from spmd.collectives.step import Step
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.plan.cost.buckets import bucketed_seconds
from spmd.plan.data.request import Request


def join_redistributions(
    graph: Graph,
    specs: Mapping[Value, DTensorSpec],
    pinned: frozenset[Value],
    latency_shares: Mapping[Value, float],
    request: Request,
) -> Graph:
    """Join every redistribution with its only consumer, if that is a redistribution and both take no longer together.

    Mesh axes, which are planned one after another, produce such pairs: an all_reduce over two axes is one. Between two
    sums in `reduce_dtype` the value would be rounded. So do constraints: of those, only a reduction whose result is
    sharded is joined, as `reshard(reshard(x, P()), P("model"))`, to a reduce_scatter, which sends half the bytes.

    Args:
        graph: a program with its redistributions as explicit operations.
        specs: the spec of every value.
        pinned: values whose specs are given, by constraints.
        latency_shares: as in `Draft`.
        request: has the machine, and the dtype of sums.

    Returns:
        The program with the pairs joined.
    """
    users = Counter(value for operation in graph.operations for value in operation.operands)
    users.update(graph.outputs)
    places: dict[Value, int] = {}
    operations: list[Operation] = []
    for operation in graph.operations:
        if operation.op is REDISTRIBUTE:
            (value,), (result,) = operation.operands, operation.tensors
            place = places.get(value)
            if place is not None and users[value] == 1:
                first = operations[place].operands[0]
                ends = specs[first], specs[value], specs[result]
                if (
                    _is_scattered(*ends)
                    if value in pinned
                    else _is_faster(*ends, request, latency_shares.get(value, 1.0))
                ):
                    operations[place] = attrs.evolve(operations[place], results=(result,))
                    places[result] = place
                    continue
            places[result] = len(operations)
        operations.append(operation)
    return attrs.evolve(graph, operations=tuple(operations))


def _is_scattered(partial: DTensorSpec, whole: DTensorSpec, result: DTensorSpec) -> bool:
    """Whether the first redistribution only reduces, and the second only shards along the reduced axes."""
    reductions, shards = redistribution(partial, whole), redistribution(whole, result)
    return (
        all(step.primitive is ALL_REDUCE for step in reductions)
        and all(step.primitive is SHARD for step in shards)
        and {axis for step in shards for axis in step.axes} <= {axis for step in reductions for axis in step.axes}
    )


def _is_faster(first: DTensorSpec, between: DTensorSpec, last: DTensorSpec, request: Request, share: float) -> bool:
    """Whether one redistribution takes no longer than two, and gathers no other shards (see `keep_sharded`)."""
    dtype = request.reduce_dtype
    apart = (*redistribution(first, between, dtype), *redistribution(between, last, dtype))
    together = redistribution(first, last, dtype)
    mesh = first.mesh
    seconds = [
        sum(
            bucketed_seconds(request.machine, mesh.axis_size(step.axes), step.sent, share)
            for step in steps
            if step.is_collective
        )
        for steps in (together, apart)
    ]
    return _gathered(first, together) <= _gathered(first, apart) and seconds[0] <= seconds[1]


def _gathered(first: DTensorSpec, steps: Sequence[Step]) -> set[str]:
    """The axes of a spec's shards that steps gather along; one that is first reduced and scattered is none."""
    gathered = {axis for step in steps if step.primitive is ALL_GATHER for axis in step.axes}
    return gathered.intersection(itertools.chain(*first.dims))
