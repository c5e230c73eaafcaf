"""The order of a plan in which what a redistribution sends is computed as soon as it can be.

In `w - 0.1 * g` a plan may scale the partial gradient before its sum. As it is written, each product stands just before
its subtraction, where its sum could be sent neither together with others nor beside the backward pass.
"""

from __future__ import annotations

import itertools

import attrs

from spmd.ir.graph import Graph, Operation
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import LEAVES
from spmd.plan.data.dataflow import is_pointwise


def hoist_sent(graph: Graph) -> Graph:
    """Move elementwise operations that only redistributions depend on, with these, to where their operands are made.

    No result of a redistribution is needed earlier for it.
    """
    kept, moved = set(graph.outputs), set[Operation]()
    for operation in reversed(graph.operations):
        read = [reader for value in operation.tensors for reader in graph.consumers.get(value, ())]
        only_sent = all(reader.op is REDISTRIBUTE or reader in moved for reader in read)
        if read and only_sent and kept.isdisjoint(operation.tensors) and _moves(operation):
            moved.add(operation)
    makers = graph.producers
    places: dict[Operation, int] = {}
    placed: list[list[Operation]] = []
    for operation in graph.operations:
        made = [makers[value] for value in operation.operands if value in makers]
        if any(maker.op in LEAVES for maker in made):
            moves = False
        elif operation.op is REDISTRIBUTE:
            moves = not moved.isdisjoint(made)
        else:
            moves = operation in moved and bool(made) and all(maker.op is not REDISTRIBUTE for maker in made)
        if not moves:
            moved.discard(operation)
            placed.append([])
        place = places[operation] = max(map(places.__getitem__, made)) if moves else len(placed) - 1
        placed[place].append(operation)
    return attrs.evolve(graph, operations=tuple(itertools.chain.from_iterable(placed)))


def _moves(operation: Operation) -> bool:
    """Whether an operation computes element by element, without effects, and by an operator of its own."""
    return operation.effect is None and operation.group is None and is_pointwise(operation)
