"""The equal layers of a program that have equal layers before and after them."""

from __future__ import annotations

from spmd.ir.graph import Graph, Value
from spmd.plan.search.repeats import find_repeats


def ties(graph: Graph) -> dict[Value, object]:
    """For each result of a layer between the first and the last of a run, its place in the layer, as in equal ones."""
    return {
        value: (number, position, place)
        for number, repeat in enumerate(find_repeats(graph))
        for layer in repeat.copies[1:-1]
        for position, operation in enumerate(layer)
        for place, value in enumerate(operation.tensors)
    }
