"""The layers of a program: which operations and values of one layer stand where those of another do.

Repeated parts (`spmd.plan.search.repeats`) give each layer's forward and backward operators. Operations around them, as
the update of a layer's parameters, belong to the layer whose values they take, or whose operations alone take theirs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence, Set

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import DRAFT_MARKERS, FREE
from spmd.plan.data.draft import Draft
from spmd.plan.search.repeats import Layer, Repeat, call_of

_ENDS = (*DRAFT_MARKERS, FREE)
"""What stands between a result and the end of the program."""


@attrs.frozen
class LayerPlace:
    """Where an operation or a value stands in a program.

    Args:
        stack, layer: the numbers of its stack and of its layer there.
        role: what it is in its layer, a number; equal layers have the same roles.
    """

    stack: int
    layer: int
    role: int


class Layers:
    """The places of the operations and values of a draft.

    Args:
        draft: the program, before any axis is planned.
        repeats: the repeated parts of the traced program, with the layers of their copies.
    """

    def __init__(self, draft: Draft, repeats: Sequence[tuple[Repeat, Sequence[Layer]]]) -> None:
        self.draft = draft
        self.operations: dict[Operation, LayerPlace] = {}
        self.values: dict[Value, LayerPlace] = {}
        self.members: dict[Layer, dict[int, Operation]] = defaultdict(dict)
        self._roles: dict[Hashable, int] = {}
        self._times: Counter[Hashable] = Counter()
        graph = draft.graph
        self._consumers, self._made = graph.consumers, graph.producers
        for index, (repeat, layers) in enumerate(repeats):
            for layer, copy in zip(layers, repeat.copies, strict=True):
                for position, operation in enumerate(copy):
                    placed = self._made.get(operation.tensors[0]) if operation.tensors else None
                    if placed is not None:
                        self._add(placed, layer, (index, position))
        self._follow(graph)
        self._lead(graph)
        self._follow(graph)
        for value in (*graph.inputs, *(value for value, _ in graph.constants)):
            self._lead_to(value, self._consumers.get(value, ()), "value")

    def _role(self, layer: Layer, key: Hashable) -> int:
        """The number of a role; of several with one key in a layer, each has its own."""
        self._times[layer, key] += 1
        return self._roles.setdefault((key, self._times[layer, key]), len(self._roles))

    def _add(self, operation: Operation, layer: Layer, key: Hashable) -> None:
        self.operations[operation] = place = LayerPlace(*layer, self._role(layer, key))
        self.members[layer][place.role] = operation
        for number, value in enumerate(operation.tensors):
            self.values[value] = LayerPlace(*layer, self._roles.setdefault((place.role, number), len(self._roles)))

    def _follow(self, graph: Graph) -> None:
        """Place operations that take values of one layer or of two neighbours, and others of the whole program.

        A value that is made from those of several layers is one of the whole program if it is used several times; else
        it is one of a chain, as a sum over layers, of which no part belongs to one.
        """
        joined: set[Value] = set()
        for operation in graph.operations:
            if operation in self.operations:
                continue
            places = [self.values.get(value) for value in operation.operands]
            layers = {(place.stack, place.layer) for place in places if place is not None}
            chained = any(value in joined and len(self._consumers[value]) == 1 for value in operation.operands)
            if layers and _are_near(layers) and not chained:
                layer = min(layers)
                roles = tuple(place and (place.role, place.layer - layer[1]) for place in places)
                self._add(operation, layer, (call_of(operation), operation.metas, roles))
            elif layers or not joined.isdisjoint(operation.operands):
                joined.update(operation.tensors)

    def _lead(self, graph: Graph) -> None:
        """Place operations whose results are taken in one layer, or two neighbours, and by the end of the program."""
        for operation in reversed(graph.operations):
            if operation not in self.operations and not any(value in self.values for value in operation.operands):
                readers = [reader for value in operation.tensors for reader in self._consumers.get(value, ())]
                kept = [reader for reader in readers if reader in self.operations or reader.op not in _ENDS]
                self._lead_to(operation, kept, (call_of(operation), operation.metas))

    def _lead_to(self, made: Operation | Value, readers: Sequence[Operation], key: Hashable) -> None:
        places = [place for reader in readers if (place := self.operations.get(reader)) is not None]
        if len(places) < len(readers) or not places or not _are_near({(place.stack, place.layer) for place in places}):
            return
        layer, role = (places[0].stack, places[0].layer), (key, places[0].role)
        if isinstance(made, Operation):
            self._add(made, layer, role)
        else:
            self.values[made] = LayerPlace(*layer, self._role(layer, role))

    def equal(self) -> Iterator[tuple[int, int, int]]:
        """For every stack: its number, and the first and the last of most consecutive layers that are equal.

        The first and the last layer of a stack count as unequal, as they have other neighbours, and so does the second,
        which may reshard what the first one makes.
        """
        counts: dict[int, int] = defaultdict(int)
        for stack, layer in self.members:
            counts[stack] = max(counts[stack], layer + 1)
        for stack, count in sorted(counts.items()):
            best, begin = (0, 0), 2
            for layer in range(2, count - 1):
                if layer > begin and not self._alike(stack, layer - 1, count - 1):
                    begin = layer
                best = max(best, (layer - begin, -begin))
            if best[0]:
                yield stack, -best[1], best[0] - best[1]

    def _alike(self, stack: int, layer: int, last: int) -> bool:
        """Whether a layer is equal to the next: the same roles, on values that have the same roles or are the same."""
        one, other = self.members[stack, layer], self.members[stack, layer + 1]
        if one.keys() != other.keys():
            return False

        def same_value(a: Value, b: Value) -> bool:
            place, there = self.values.get(a), self.values.get(b)
            if a is b:
                return place is None or place.stack != stack or place.layer in (0, last)
            if place is None or there is None or place.role != there.role or {place.stack, there.stack} != {stack}:
                return False
            near = place.layer - layer == there.layer - layer - 1 and abs(place.layer - layer) <= 1
            return near and (a in self._made or self._facts(a) == self._facts(b))

        def same_region(a: Operation, b: Operation) -> bool:
            opens, there = regions.around(a), regions.around(b)
            return opens is there or (opens is not None and there is other.get(self._role_in(stack, layer, opens)))

        regions = self.draft.graph.regions
        return all(
            self._same(operation, other[role], same_value) and same_region(operation, other[role])
            for role, operation in one.items()
        )

    def _role_in(self, stack: int, layer: int, operation: Operation) -> int:
        """The role of an operation of a layer; -1 for one that is not."""
        place = self.operations.get(operation)
        return place.role if place is not None and (place.stack, place.layer) == (stack, layer) else -1

    def _same(self, one: Operation, other: Operation, same_value: Callable[[Value, Value], bool]) -> bool:
        """Whether two operations are equal: the same calls on such values, with the same choices and results."""
        draft = self.draft
        return (
            call_of(one) == call_of(other)
            and len(one.results) == len(other.results)
            and draft.options.get(one) == draft.options.get(other)
            and draft.pinned.get(one) == draft.pinned.get(other)
            and all(map(same_value, one.operands, other.operands))
            and all(self._facts(a) == self._facts(b) for a, b in zip(one.tensors, other.tensors, strict=True))
        )

    def _facts(self, value: Value) -> Hashable:
        """What the search knows of a value, and how often operations of no layer take it."""
        draft = self.draft
        outside = sum(reader not in self.operations for reader in self._consumers.get(value, ()))
        kinds = value in draft.fused, value in draft.copied, value in draft.independent
        given = draft.given.get(value), draft.ends.get(value), draft.never_gathered.get(value)
        return value.meta, draft.logical[value], kinds, draft.latency_shares.get(value), given, outside


def _are_near(layers: Set[Layer]) -> bool:
    """Whether layers are one, or neighbours: the copies of a backward pass may begin elsewhere in a layer."""
    numbers = [number for _, number in layers]
    return len({stack for stack, _ in layers}) == 1 and max(numbers) - min(numbers) <= 1
