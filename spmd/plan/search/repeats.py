"""Finds the repeated parts of a program: sequences of operations that occur several times in a row, as layers do.

Candidates are tandem repeats (Main and Lorentz, 1984) in the sequence of calls, regardless of which tensors they take.
Then copies are compared: two copies are the same subgraph if they have the same canonical form.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs

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

    Candidates that cover more operations are taken first and, of equal ones, those with the shorter copy. A candidate
    must contain an operator with a FLOP formula, such as a matrix product, and each copy must take a result of the copy
    before it. So layers are found, and updates of one parameter after the other are not. Operations that are
    independent of inputs are in no copy: a mask that the first layer computes for all layers is not part of it.
    """
    independent = independent_values(graph)
    operations = [o for o in graph.operations if o.op in BOUNDS or not independent.issuperset(o.tensors)]
    tokens = _tokens(operations)
    runs = list(_runs(tokens))
    heapq.heapify(runs)
    taken = bytearray(len(operations))
    found: dict[int, tuple[_Run, Repeat]] = {}
    while runs:
        run = heapq.heappop(runs)
        if not any(has_formula(operation.op) for operation in operations[run.begin : run.begin + run.period]):
            continue
        copies = [tuple(operations[n : n + run.period]) for n in range(run.begin, run.end, run.period)]
        parts = list(_free_parts(run, taken) if any(taken[run.begin : run.stop]) else _alike_parts(run, copies))
        if parts != [run]:
            for part in parts:
                heapq.heappush(runs, part)
        elif handed_on := _handed_on(copies):
            found[run.begin] = run, Repeat(tuple(copies), handed_on)
            taken[run.begin : run.end] = bytes([True]) * (run.end - run.begin)

    def completed(run: _Run, repeat: Repeat) -> Repeat:
        free = itertools.takewhile(lambda place: not taken[place], range(run.end, run.stop))
        return attrs.evolve(repeat, rest=tuple(map(operations.__getitem__, free)))

    return tuple(completed(*found[begin]) for begin in sorted(found))


def call_of(operation: Operation) -> Hashable:
    """The call without its tensors: equal for what is the same in two layers. Second computations are numbered."""
    return RECOMPUTE if operation.op is RECOMPUTE else operation.form


def _tokens(operations: Sequence[Operation]) -> list[int]:
    """A number for every operation, the same for equal calls: operator, literal arguments, metas of all tensors."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault((call_of(operation), operation.metas), len(numbers)) for operation in operations]


@attrs.frozen(order=True)
class _Run:
    """A periodic part of the sequence; runs compare in the order in which they are tried.

    Args:
        rank: minus the number of operations in complete copies.
        period: the number of operations in one copy.
        begin, stop: the bounds of the run, `stop` excluded. An incomplete copy may be at its end.
    """

    rank: int
    period: int
    begin: int
    stop: int

    @classmethod
    def within(cls, period: int, begin: int, stop: int) -> Iterator[_Run]:
        """The run with these bounds; nothing if it has fewer than two complete copies."""
        whole = stop - begin - (stop - begin) % period
        if whole >= 2 * period:
            yield cls(-whole, period, begin, stop)

    @property
    def end(self) -> int:
        """The end of the last complete copy."""
        return self.begin - self.rank


def _runs(tokens: Sequence[int]) -> Iterator[_Run]:
    """The maximal runs: in each, every token equals the token one period before it."""
    for period in sorted(_periods(tokens)):
        begin = 0
        for same, group in itertools.groupby(map(operator.eq, tokens, tokens[period:])):
            end = begin + len(list(group))
            if same:
                yield from _Run.within(period, begin, end + period)
            begin = end


def _periods(tokens: Sequence[int]) -> set[int]:
    """Likely periods: the distances between neighbouring occurrences of equal windows of 1, 2, 4, ... tokens.

    Windows are named as by Karp, Miller and Rosenberg (1972): a window of twice the width is a pair of names. In a
    periodic part most windows recur one period later, unless they are so narrow that they also occur in between.
    """
    found: set[int] = set()
    names, width = tokens, 1
    while len(set(names)) < len(names):
        last: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for position, name in enumerate(names):
            if name in last:
                distances[position - last[name]] += 1
            last[name] = position
        found.update(distance for distance, count in distances.items() if 4 * count >= distance)
        pairs = list(zip(names, names[width:], strict=False))
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        names, width = [numbers[pair] for pair in pairs], 2 * width
    return found


def _free_parts(run: _Run, taken: bytearray) -> Iterator[_Run]:
    """The parts of a run between operations that are already taken."""
    begin = run.begin
    for is_taken, group in itertools.groupby(taken[run.begin : run.stop]):
        end = begin + len(list(group))
        if not is_taken:
            yield from _Run.within(run.period, begin, end)
        begin = end


def _alike_parts(run: _Run, copies: Sequence[Copy]) -> Iterator[_Run]:
    """The parts of a run whose copies are the same subgraph; the run itself, if all are."""
    groups = [len(list(group)) for _, group in itertools.groupby(copies, key=_wiring)]
    begin = run.begin
    for position, count in enumerate(groups, 1):
        end = begin + run.period * count
        yield from _Run.within(run.period, begin, end if position < len(groups) else run.stop)
        begin = end


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
    copies, period = repeat.copies, len(repeat.copies[0])
    run = list(itertools.chain(*copies, repeat.rest))
    index = {operation: place for place, operation in enumerate(run)}
    middle = (len(copies) - 1) // 2
    held = [0] * period
    for operation in copies[middle]:
        made = index[operation]
        for value in operation.tensors:
            last = max((index.get(reader, made) for reader in graph.consumers.get(value, ())), default=made)
            for place in range(made + 1, min(last, made + period) + 1):
                held[place % period] += 1
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
