"""A peephole optimisation: two redistributions become one, where they reduce and shard, or sum in another dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs
import torch

from spmd.collectives.resharding import redistribution
from spmd.collectives.traffic import StepKind
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import REDISTRIBUTE


def join_redistributions(
    graph: Graph, specs: Mapping[Value, DTensorSpec], reduce_dtype: torch.dtype | None = None
) -> Graph:
    """Join redistributions with their only consumers, if those are redistributions, in two cases.

    - The first only reduces, and the second only shards along the reduced axes. Constraints produce such pairs, as
      `reshard(reshard(x, P()), P("model"))`. A reduce_scatter sends half the bytes of an all_reduce.
    - Both sum in `reduce_dtype`: between them the sum would be rounded. Mesh axes that are planned one after another
      produce such pairs. They are joined unless more bytes would be sent.

    Args:
        graph: a program with its redistributions as explicit operations.
        specs: the spec of every value.
        reduce_dtype: as in `Request`.

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
                ends = (specs[operations[place].operands[0]], specs[value], specs[result])
                if _is_scattered(*ends) or _sums_twice(*ends, reduce_dtype):
                    operations[place] = attrs.evolve(operations[place], results=(result,))
                    places[result] = place
                    continue
            places[result] = len(operations)
        operations.append(operation)
    return attrs.evolve(graph, operations=tuple(operations))


def _is_scattered(partial: DTensorSpec, whole: DTensorSpec, result: DTensorSpec) -> bool:
    reduced = {axis for step in redistribution(partial, whole) for axis in step.axes}
    return (
        all(step.kind is StepKind.ALL_REDUCE for step in redistribution(partial, whole))
        and all(step.kind is StepKind.SHARD for step in redistribution(whole, result))
        and reduced.issuperset(axis for step in redistribution(whole, result) for axis in step.axes)
    )


def _sums_twice(first: DTensorSpec, between: DTensorSpec, last: DTensorSpec, reduce_dtype: torch.dtype | None) -> bool:
    if reduce_dtype is None:
        return False
    steps = [redistribution(*ends, reduce_dtype) for ends in ((first, between), (between, last))]
    together = sum(step.bytes for step in redistribution(first, last, reduce_dtype))
    casts = all(any(step.dtype is not None for step in found) for found in steps)
    return casts and together <= sum(step.bytes for found in steps for step in found)
