"""A program as independent parts, each of which computes some of the outputs.

What several parts need is computed in each. Operations with effects are in one part, and the parts in the order of
these, so that running them one after the other is running the program.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from spmd.ir.graph import Graph, Operation, Value


@attrs.frozen(eq=False)
class Part:
    """A part of a program.

    Args:
        graph: the part; inputs are those of the program that it reads, and values at which it was cut.
        outputs: which outputs of the program its outputs are.
    """

    graph: Graph
    outputs: tuple[int, ...]

    def key(self) -> Hashable:
        """What the part computes: equal for parts that compute the same of other inputs; constants are the same."""
        graph = self.graph
        numbers: dict[Value, int] = {}
        for value in graph.inputs:
            numbers[value] = len(numbers)
        for value, _ in graph.constants:
            numbers[value] = len(numbers)
        rows: list[Any] = [tuple(value.meta for value in graph.inputs), tuple(id(x) for _, x in graph.constants)]
        for operation in graph.operations:
            rows.append((operation.form, tuple(numbers[value] for value in operation.operands)))
            for value in operation.tensors:
                numbers[value] = len(numbers)
        return (*rows, tuple(numbers[value] for value in graph.outputs))


def parts(graph: Graph, cuts: Collection[Value] = ()) -> list[Part]:
    """The parts of a program; one with loops or branches is one part.

    Args:
        graph: the program.
        cuts: values that are inputs of parts, whatever they are computed from.
    """
    order = {operation: number for number, operation in enumerate(graph.operations)}
    effects = [operation for operation in graph.operations if operation.effect is not None]
    if graph.regions:
        return [_part(graph, range(len(graph.outputs)), effects, cuts, order)]
    places = {operation: number for number, operation in enumerate(effects)}
    slices = [_needed(graph, [value], cuts) for value in graph.outputs]
    spans = [[places[operation] for operation in needed if operation in places] for needed in slices]
    groups: list[_Group] = [(n, n, []) for n in range(len(effects))]
    groups += [(min(span), max(span), [n]) for n, span in enumerate(spans) if span]
    found = [_part(graph, outputs, effects[a : b + 1], cuts, order) for a, b, outputs in _joined(groups)]
    return found + [_part(graph, [n], [], cuts, order) for n, span in enumerate(spans) if not span]


_Group: TypeAlias = tuple[int, int, list[int]]
"""The first and the last effect of a part, by number, and its outputs."""


def _joined(groups: Sequence[_Group]) -> list[_Group]:
    """Groups of which none needs an effect between those of another; in order."""
    joined: list[_Group] = []
    for first, last, outputs in sorted(groups):
        if joined and first <= joined[-1][1]:
            start, end, others = joined.pop()
            first, last, outputs = start, max(end, last), others + outputs
        joined.append((first, last, outputs))
    return joined


def _part(
    graph: Graph,
    outputs: Sequence[int],
    effects: Sequence[Operation],
    cuts: Collection[Value],
    order: Mapping[Operation, int],
) -> Part:
    results = tuple(graph.outputs[n] for n in sorted(outputs))
    roots = [*results, *(value for operation in effects for value in operation.operands)]
    needed = {**_needed(graph, roots, cuts), **dict.fromkeys(effects)}
    operations = tuple(sorted(needed, key=order.__getitem__))
    read = dict.fromkeys([*(value for operation in operations for value in operation.operands), *results])
    inputs = tuple(value for value in read if value in cuts or value in graph.inputs)
    constants = tuple((value, tensor) for value, tensor in graph.constants if value in read)
    return Part(Graph(inputs, constants, operations, results), tuple(sorted(outputs)))


def _needed(graph: Graph, roots: Sequence[Value], cuts: Collection[Value]) -> dict[Operation, None]:
    """The operations that values need, down to the cuts."""
    needed: dict[Operation, None] = {}
    pending = list(roots)
    while pending:
        value = pending.pop()
        operation = None if value in cuts else graph.producers.get(value)
        if operation is not None and operation not in needed:
            needed[operation] = None
            pending.extend(operation.operands)
    return needed
