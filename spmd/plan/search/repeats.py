"""Finds the repeated parts of a program: sequences of operations that occur several times in a row, as layers do.

Candidates are tandem repeats in the sequence of calls (`spmd.core.runs`), regardless of which tensors they take. Then
copies are compared: two copies are the same subgraph if they have the same canonical form.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs

from spmd.core.runs import Run, disjoint_runs, held_before
from spmd.ir.dataflow import independent_values
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.recompute import RECOMPUTE
from spmd.ir.regions import BOUNDS
from spmd.plan.cost.flops import has_formula

Copy: TypeAlias = tuple[Operation, ...]
"""The operations of one copy, in order of execution."""


@attrs.frozen(eq=False)
class Repeat:
    """Equal copies of a subgraph, each of which takes a result of the copy before it.

    Args:
        copies: in order of execution, all of the same length. Corresponding operations make the same call on tensors
            of the same metas, with the same data flow between them.
        handed_on: the results that a copy takes from the copy before it, each as the position of the operation in its
            copy and of the tensor among the operation's results.
        rest: the operations of an incomplete copy behind the last one.
    """

    copies: tuple[Copy, ...]
    handed_on: frozenset[tuple[int, int]]
    rest: Copy = ()

    def begun_at(self, place: int) -> Repeat:
        """The same operations in copies that begin at a position of these; those before it are left out."""
        period = len(self.copies[0])
        run = (*itertools.chain(*self.copies), *self.rest)[place:]
        ends = range(period, len(run) + 1, period)
        copies = tuple(run[end - period : end] for end in ends)
        return attrs.evolve(self, copies=copies, rest=run[len(copies) * period :]) if place else self


def find_repeats(graph: Graph) -> tuple[Repeat, ...]:
    """The repeated parts of a program, in order of execution; no operation is in two.

    Each contains an operator with a FLOP formula, such as a matrix product, and each copy takes a result of the copy
    before it. So layers are found, and updates of one parameter after the other are not. Operations that are
    independent of inputs are in no copy: a mask that the first layer computes for all layers is not part of it.
    """
    independent = independent_values(graph)
    operations = [o for o in graph.operations if o.op in BOUNDS or not independent.issuperset(o.tensors)]

    def copies(run: Run) -> list[Copy]:
        return [tuple(operations[n : n + run.period]) for n in range(run.begin, run.end, run.period)]

    def alike(run: Run) -> Iterator[Run]:
        if any(has_formula(operation.op) for operation in operations[run.begin : run.begin + run.period]):
            yield from run.grouped([len(list(group)) for _, group in itertools.groupby(copies(run), key=_wiring)])

    def repeat(run: Run) -> Repeat:
        return Repeat(tuple(copies(run)), _handed_on(copies(run)), tuple(operations[run.end : run.stop]))

    return tuple(map(repeat, disjoint_runs(_tokens(operations), alike, lambda run: bool(_handed_on(copies(run))))))


def call_of(operation: Operation) -> Hashable:
    """The call without its tensors: equal for what is the same in two layers. Second computations are numbered."""
    return RECOMPUTE if operation.op is RECOMPUTE else operation.form


def _tokens(operations: Sequence[Operation]) -> list[int]:
    """A number for every operation, the same for equal calls: operator, literal arguments, metas of all tensors."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault((call_of(operation), operation.metas), len(numbers)) for operation in operations]


def _wiring(copy: Copy) -> tuple[tuple[int, ...], ...]:
    """The data flow of a copy in canonical form: the operands of each operation, numbered by first appearance."""
    numbers: dict[Value, int] = {}
    form = []
    for operation in copy:
        form.append(tuple(numbers.setdefault(value, len(numbers)) for value in operation.operands))
        for value in operation.tensors:
            numbers[value] = len(numbers)
    return tuple(form)


def _handed_on(copies: Sequence[Copy]) -> frozenset[tuple[int, int]]:
    """The results that copies take from the copies before them; empty unless each copy takes some."""
    handed_on: set[tuple[int, int]] = set()
    for before, after in itertools.pairwise(copies):
        operands = {value for operation in after for value in operation.operands}
        places = {
            (position, number)
            for position, operation in enumerate(before)
            for number, value in enumerate(operation.tensors)
            if value in operands
        }
        if not places:
            return frozenset()
        handed_on |= places
    return frozenset(handed_on)


Layer: TypeAlias = tuple[int, int]
"""A layer: the number of its stack, as an encoder or a decoder, and its own in that."""


def numbered(repeats: Sequence[Repeat]) -> list[tuple[Layer, ...]]:
    """The layer of each copy of each repeat.

    Copies of a backward pass have the numbers of those whose values they take, upwards or downwards; other repeats are
    stacks of their own, in order. The layers of a stack begin at 0.
    """
    numbering = _Numbering()
    return numbering.shifted([numbering.add(repeat, numbering.layers(repeat)) for repeat in repeats])


def aligned(repeats: Sequence[Repeat], graph: Graph) -> list[tuple[Repeat, tuple[Layer, ...]]]:
    """The repeats with the layers of their copies, which begin where the fewest values pass from copy to copy.

    Of several such places it is the one where a backward copy takes the most values from its own forward copy.
    """
    numbering = _Numbering()
    found = []
    for repeat in repeats:
        turned = [repeat.begun_at(place) for place in _narrowest(repeat, graph)]
        best = min(turned, key=lambda each: numbering.strays(each, numbering.layers(each)))
        found.append((best, numbering.add(best, numbering.layers(best))))
    layers = numbering.shifted([layers for _, layers in found])
    return [(repeat, shifted) for (repeat, _), shifted in zip(found, layers, strict=True)]


def _narrowest(repeat: Repeat, graph: Graph) -> list[int]:
    """The positions in a copy before which the fewest values are held that operations behind them in the run take."""
    run = list(itertools.chain(*repeat.copies, repeat.rest))
    index = {operation: place for place, operation in enumerate(run)}
    middle = repeat.copies[(len(repeat.copies) - 1) // 2]
    readers = [(o, graph.consumers.get(value, ())) for o in middle for value in o.tensors]
    spans = ((index[made], max((index.get(o, 0) for o in found), default=0)) for made, found in readers)
    held = held_before(len(middle), spans)
    return [place for place, count in enumerate(held) if count == min(held)]


class _Numbering:
    """Numbers repeats one after the other."""

    def __init__(self) -> None:
        self._owners: dict[Value, Layer] = {}
        self._count = 0

    def layers(self, repeat: Repeat) -> tuple[Layer, ...]:
        """The layers of the copies of the next repeat, not yet shifted."""
        taken: Counter[tuple[int, int, int]] = Counter()
        for number, copy in enumerate(repeat.copies):
            counts = Counter(self._owned(copy))
            for (stack, layer), _ in counts.most_common(1):
                taken.update({(stack, 1, layer - number): 1, (stack, -1, layer + number): 1})
        own = (self._count, 1, 0)
        (stack, sign, begin), agree = max(taken.items(), key=operator.itemgetter(1), default=(own, 0))
        if 2 * agree < len(repeat.copies) or agree < 2:
            stack, sign, begin = own
        return tuple((stack, begin + sign * number) for number in range(len(repeat.copies)))

    def strays(self, repeat: Repeat, layers: Sequence[Layer]) -> int:
        """How many operands are of other layers than the copies that take them."""
        return sum(
            owner != layer for copy, layer in zip(repeat.copies, layers, strict=True) for owner in self._owned(copy)
        )

    def add(self, repeat: Repeat, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Give the copies of the next repeat their layers, with what they make and what they alone take."""
        self._count += 1
        takers: dict[Value, Layer | None] = {}
        for layer, copy in zip(layers, repeat.copies, strict=True):
            for value in itertools.chain.from_iterable(operation.operands for operation in copy):
                takers[value] = layer if takers.get(value, layer) == layer else None
        self._owners.update((value, layer) for value, layer in takers.items() if layer and value not in self._owners)
        for layer, copy in zip(layers, repeat.copies, strict=True):
            self._owners.update((value, layer) for operation in copy for value in operation.tensors)
        return layers

    def shifted(self, found: Sequence[tuple[Layer, ...]]) -> list[tuple[Layer, ...]]:
        """The layers of all repeats, of which the first of each stack is 0."""
        first: dict[int, int] = {}
        for stack, layer in itertools.chain.from_iterable(found):
            first[stack] = min(layer, first.get(stack, layer))
        return [tuple((stack, layer - first[stack]) for stack, layer in layers) for layers in found]

    def _owned(self, copy: Copy) -> Iterator[Layer]:
        for operation in copy:
            for value in operation.operands:
                if value in self._owners:
                    yield self._owners[value]
