"""Planning equal layers once: a program in which one layer stands for many, and its plan for the whole program.

Of consecutive equal layers the search sees one, whose costs count as often as there are layers. What it takes from the
layer before it has the same placements as what it gives to the next (a *tie*); so the choices for it are choices for
all. The layers before and after it are planned by themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.plan.data.draft import Counts, Draft
from spmd.plan.search.equal_layers import LayerPlace, Layers
from spmd.plan.search.repeats import Layer, Repeat

_NOTHING: Mapping[Operation, Operation] = MappingProxyType({})
_NO_VALUES: Mapping[Value, Value] = MappingProxyType({})


@attrs.frozen(eq=False)
class Folded:
    """A program before planning, and the shorter one that is planned in its place.

    Args:
        whole: the program.
        draft: the shorter one; `whole` itself if no layers are equal.
        operations: by operation of the whole program, the one of the shorter program that stands for it.
        values: likewise for values, where it is another one.
    """

    whole: Draft
    draft: Draft
    operations: Mapping[Operation, Operation] = _NOTHING
    values: Mapping[Value, Value] = _NO_VALUES

    @property
    def is_whole(self) -> bool:
        """Whether no layer is left out."""
        return self.draft is self.whole

    def prices(self, prices: Mapping[Value, float]) -> Mapping[Value, float]:
        """The memory prices of values of the shorter program: of all together that they stand for."""
        found: dict[Value, float] = defaultdict(float)
        for value, price in prices.items():
            found[self.values.get(value, value)] += price
        return found


def fold(draft: Draft, repeats: Sequence[tuple[Repeat, Sequence[Layer]]]) -> Folded:
    """The shorter program for a draft of which no axis is planned.

    Args:
        draft: the whole program.
        repeats: its repeated parts, with the layers of their copies; none to leave it as it is.
    """
    if not repeats or draft.graph.variants is not None:
        return Folded(draft, draft)
    layers = Layers(draft, repeats)
    spans = {stack: (first, last) for stack, first, last in layers.equal()}
    return _Folder(draft, layers, spans).run() if spans else Folded(draft, draft)


class _Folder:
    """Leaves out the layers that another one stands for.

    Args:
        draft: the whole program.
        layers: the places of its operations and values.
        spans: by stack, the layer that stands for others, and the last of these.
    """

    def __init__(self, draft: Draft, layers: Layers, spans: Mapping[int, tuple[int, int]]) -> None:
        self.draft, self.layers, self.spans = draft, layers, spans
        self.at = {place: value for value, place in layers.values.items()}
        self.made: dict[Value, int] = {}
        self.moved: dict[Value, int] = {}
        self.ties: dict[tuple[Value, Value], None] = {}

    def run(self) -> Folded:
        graph = self.draft.graph
        kept = {
            operation: operation.with_operands(partial(self.operand, operation))
            for operation in graph.operations
            if not self.is_left_out(self.layers.operations.get(operation))
        }
        folded = Graph(
            tuple(value for value in graph.inputs if not self.is_left_out(self.layers.values.get(value))),
            tuple(pair for pair in graph.constants if not self.is_left_out(self.layers.values.get(pair[0]))),
            tuple(kept.values()),
            tuple(value for value in graph.outputs if not self.is_left_out(self.layers.values.get(value))),
        )
        if not _is_ordered(folded):
            return Folded(self.draft, self.draft)
        for value, place in self.layers.values.items():
            if place.stack in self.spans and place.layer == self.spans[place.stack][0]:
                first, last = self.spans[place.stack]
                self.made[value] = last - first + 1
        values = {value: self.model(value) for value, place in self.layers.values.items() if self.is_left_out(place)}
        draft = attrs.evolve(
            self.draft,
            graph=folded,
            options={new: self.draft.options[old] for old, new in kept.items() if old in self.draft.options},
            pinned={new: self.draft.pinned[old] for old, new in kept.items() if old in self.draft.pinned},
            counts=Counts(self.made, self.moved, tuple(self.ties)),
        )
        operations = {operation: kept[self.model_of(operation)] for operation in graph.operations}
        return Folded(self.draft, draft, operations, values)

    def is_left_out(self, place: LayerPlace | None) -> bool:
        """Whether another operation or value stands for what is at a place."""
        if place is None or place.stack not in self.spans:
            return False
        first, last = self.spans[place.stack]
        return first < place.layer <= last

    def model(self, value: Value) -> Value:
        """The value that stands for another one."""
        place = self.layers.values.get(value)
        if place is None or not self.is_left_out(place):
            return value
        return self.at[attrs.evolve(place, layer=self.spans[place.stack][0])]

    def model_of(self, operation: Operation) -> Operation:
        """The operation that stands for another one."""
        place = self.layers.operations.get(operation)
        if place is None or not self.is_left_out(place):
            return operation
        return self.layers.members[place.stack, self.spans[place.stack][0]][place.role]

    def operand(self, reader: Operation, value: Value) -> Value:
        """What an operation takes in place of a value; counts how often that is made and moved, and ties it."""
        place, own = self.layers.values.get(value), self.layers.operations.get(reader)
        if place is None or place.stack not in self.spans:
            return value
        first, last = self.spans[place.stack]
        count = last - first + 1
        if own is None or own.stack != place.stack or own.layer != first:
            taken = self.model(value)
            if (own is None or own.stack != place.stack) and self.layers.values[taken].layer == first:
                self.moved[taken] = count
            return taken
        next_layer = self.layers.members[own.stack, first + 1][own.role]
        if any(
            one is value and other is value for one, other in zip(reader.operands, next_layer.operands, strict=True)
        ):
            return value  # all layers take it, from the first or the last one
        if place.layer == first + 1:
            value = self.at[attrs.evolve(place, layer=last + 1)]
        if place.layer != first and value in self.draft.graph.producers:
            self.ties[value, self.at[attrs.evolve(place, layer=first)]] = None
        self.moved[value] = count
        return value


def _is_ordered(graph: Graph) -> bool:
    """Whether every value is made before it is read."""
    made = {*graph.inputs, *(value for value, _ in graph.constants)}
    for operation in graph.operations:
        if not made.issuperset(operation.operands):
            return False
        made.update(operation.tensors)
    return True
