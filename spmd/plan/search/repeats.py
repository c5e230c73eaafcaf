"""Finds the repeated parts of a program: sequences of operations that occur several times in a row, as layers do.

Candidates are tandem repeats (Main and Lorentz, 1984) in the sequence of calls, regardless of which tensors they take.
Then copies are compared: two copies are the same subgraph if they have the same canonical form.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import attrs

from spmd.ir.dataflow import independent_values
from spmd.ir.graph import Graph, Operation, Value
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
    """

    copies: tuple[Copy, ...]
    handed_on: frozenset[tuple[int, int]]


def find_repeats(graph: Graph) -> tuple[Repeat, ...]:
    """The repeated parts of a program, in order of execution; no operation is in two.

    Candidates that cover more operations are taken first and, of equal ones, those with the shorter copy. A candidate
    must contain an operator with a FLOP formula, such as a matrix product, and each copy must take a result of the copy
    before it. So layers are found, and updates of one parameter after the other are not. Operations that are
    independent of inputs are in no copy: a mask that the first layer computes for all layers is not part of it.
    """
    independent = independent_values(graph)
    operations = [operation for operation in graph.operations if not independent.issuperset(operation.tensors)]
    tokens = _tokens(operations)
    runs = list(_runs(tokens))
    heapq.heapify(runs)
    taken = bytearray(len(operations))
    found: dict[int, Repeat] = {}
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
            found[run.begin] = Repeat(tuple(copies), handed_on)
            taken[run.begin : run.end] = bytes([True]) * (run.end - run.begin)
    return tuple(found[begin] for begin in sorted(found))


def _tokens(operations: Sequence[Operation]) -> list[int]:
    """A number for every operation, the same for equal calls: operator, literal arguments, metas of all tensors."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault((operation.form, operation.metas), len(numbers)) for operation in operations]


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
