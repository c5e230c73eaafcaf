"""The equal layers of a program that have equal layers before and after them."""

from __future__ import annotations

from spmd.inspect.layers.layers import find_repeats
from spmd.ir.graph import Graph, Operation, Value


def repeated_layers(graph: Graph) -> list[list[Operation]]:
    """The operations of each layer between the first and the last of a run."""
    return [list(layer) for repeat in find_repeats(graph) for layer in repeat.copies[1:-1]]


def ties(graph: Graph) -> dict[Value, object]:
    """For each result of such a layer, its place in the layer, which equal layers share."""
    return {
        value: (number, position, place)
        for number, repeat in enumerate(find_repeats(graph))
        for layer in repeat.copies[1:-1]
        for position, operation in enumerate(layer)
        for place, value in enumerate(operation.tensors)
    }
