"""Planning equal layers once: a program in which one layer stands for many, and its plan for the whole program.

Consecutive equal layers have the same strategies, which the search decides once. Of more than three of them it sees the
first, the second and the last: the second stands for all between these two, and its costs count as often as there are
such layers. The first and the last take values from other layers, which may be resharded otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.plan.data.draft import Draft, Equals
from spmd.plan.search.equal_layers import LayerPlace, Layers, Run
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
    runs = tuple(layers.runs())
    return _Folder(draft, layers, runs).run() if runs else Folded(draft, draft)


class _Folder:
    """Leaves out the layers that another one stands for.

    Args:
        draft: the whole program.
        layers: the places of its operations and values.
        runs: its runs of equal layers.
    """

    def __init__(self, draft: Draft, layers: Layers, runs: Sequence[Run]) -> None:
        self.draft, self.layers = draft, layers
        self.at = {place: value for value, place in layers.values.items()}
        self.runs = {(run.stack, layer): run for run in runs for layer in range(run.first, run.last + 1)}

    def run(self) -> Folded:
        graph = self.draft.graph
        kept = {
            operation: operation.with_operands(partial(self.model, operation))
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
        values = {
            value: self.model(None, value) for value, place in self.layers.values.items() if self.is_left_out(place)
        }
        draft = attrs.evolve(
            self.draft,
            graph=folded,
            options={new: self.draft.options[old] for old, new in kept.items() if old in self.draft.options},
            pinned={new: self.draft.pinned[old] for old, new in kept.items() if old in self.draft.pinned},
            equals=self.equals(),
        )
        if len(kept) == len(graph.operations):
            return Folded(draft, draft)
        operations = {operation: kept[self.model_of(operation)] for operation in graph.operations}
        return Folded(self.draft, draft, operations, values)

    def equals(self) -> Equals:
        """What stands for several of its kind, and what is the same in several layers."""
        times: dict[Value, int] = {}
        first: dict[Value, Value] = {}
        for value, place in self.layers.values.items():
            run = self.runs.get((place.stack, place.layer))
            if run is not None and not self.is_left_out(place):
                first[value] = self.at[attrs.evolve(place, layer=run.first)]
                if place.layer == run.model and run.count > 1:
                    times[value] = run.count
        return Equals(times, first)

    def is_left_out(self, place: LayerPlace | None) -> bool:
        """Whether another operation or value stands for what is at a place."""
        run = self.runs.get((place.stack, place.layer)) if place is not None else None
        return place is not None and run is not None and run.model < place.layer < run.last

    def model(self, reader: Operation | None, value: Value) -> Value:
        """The value that stands for another one, where an operation takes it."""
        place = self.layers.values.get(value)
        if place is None or not self.is_left_out(place):
            return value
        run, own = self.runs[place.stack, place.layer], self.layers.operations.get(reader) if reader else None
        follows = own is not None and (own.stack, own.layer) == (run.stack, run.model)
        return self.at[attrs.evolve(place, layer=run.last if follows else run.model)]

    def model_of(self, operation: Operation) -> Operation:
        """The operation that stands for another one."""
        place = self.layers.operations.get(operation)
        if place is None or not self.is_left_out(place):
            return operation
        return self.layers.members[place.stack, self.runs[place.stack, place.layer].model][place.role]


def _is_ordered(graph: Graph) -> bool:
    """Whether every value is made before it is read."""
    made = {*graph.inputs, *(value for value, _ in graph.constants)}
    for operation in graph.operations:
        if not made.issuperset(operation.operands):
            return False
        made.update(operation.tensors)
    return True
