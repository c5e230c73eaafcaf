"""Tandem repeats in a sequence of tokens: parts that occur several times in a row (Main and Lorentz, 1984)."""

from __future__ import annotations

import heapq
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs


@attrs.frozen(order=True)
class Run:
    """A periodic part of a sequence; runs compare in the order in which they are tried.

    Args:
        rank: minus the number of tokens in complete copies.
        period: the number of tokens in one copy.
        begin, stop: the bounds of the run, `stop` excluded. An incomplete copy may be at its end.
    """

    rank: int
    period: int
    begin: int
    stop: int

    @classmethod
    def within(cls, period: int, begin: int, stop: int) -> Iterator[Run]:
        """The run with these bounds; nothing if it has fewer than two complete copies."""
        whole = stop - begin - (stop - begin) % period
        if whole >= 2 * period:
            yield cls(-whole, period, begin, stop)

    @property
    def end(self) -> int:
        """The end of the last complete copy."""
        return self.begin - self.rank

    def free_parts(self, taken: bytearray) -> Iterator[Run]:
        """The parts of the run between positions that are taken."""
        begin = self.begin
        for is_taken, group in itertools.groupby(taken[self.begin : self.stop]):
            end = begin + len(list(group))
            if not is_taken:
                yield from Run.within(self.period, begin, end)
            begin = end

    def grouped(self, sizes: Sequence[int]) -> Iterator[Run]:
        """The parts of the run with these numbers of copies; the incomplete copy is at the end of the last."""
        begin = self.begin
        for position, count in enumerate(sizes, 1):
            end = begin + self.period * count
            yield from Run.within(self.period, begin, end if position < len(sizes) else self.stop)
            begin = end


def disjoint_runs(
    tokens: Sequence[int], alike: Callable[[Run], Iterator[Run]], accept: Callable[[Run], bool] = lambda _: True
) -> list[Run]:
    """Runs of a sequence that share no token of a complete copy, in order.

    Runs that cover more tokens are taken first and, of equal ones, those with the shorter copy.

    Args:
        tokens: the sequence.
        alike: the parts of a run whose copies are truly alike; the run itself, if all are.
        accept: whether a run of alike copies is taken.
    """
    runs = list(_maximal(tokens))
    heapq.heapify(runs)
    taken = bytearray(len(tokens))
    found = []
    while runs:
        run = heapq.heappop(runs)
        parts = list(run.free_parts(taken) if any(taken[run.begin : run.stop]) else alike(run))
        if parts != [run]:
            for part in parts:
                heapq.heappush(runs, part)
        elif accept(run):
            found.append(run)
            taken[run.begin : run.end] = bytes([True]) * (run.end - run.begin)

    def within_free(run: Run) -> Run:
        stop = taken.find(True, run.end, run.stop)
        return run if stop < 0 else attrs.evolve(run, stop=stop)

    return sorted(map(within_free, found), key=operator.attrgetter("begin"))


def _maximal(tokens: Sequence[int]) -> Iterator[Run]:
    """The maximal runs: in each, every token equals the token one period before it."""
    for period in sorted(_periods(tokens)):
        equal = bytes(map(operator.eq, tokens, tokens[period:]))
        for found in re.finditer(b"\1{%d,}" % period, equal):
            yield from Run.within(period, found.start(), found.end() + period)


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
        numbers: dict[Any, int] = {}
        names, width = [numbers.setdefault(pair, len(numbers)) for pair in pairs], 2 * width
    return found


def held_before(period: int, spans: Iterable[tuple[int, int]]) -> list[int]:
    """For each place in a copy of a run, how many values are held before it that later tokens of the run read.

    Args:
        period: the number of tokens in one copy.
        spans: for each value of one copy the positions in the run where it is made and where it is last read.
    """
    held = [0] * period
    for made, last in spans:
        for position in range(made + 1, min(last, made + period) + 1):
            held[position % period] += 1
    return held
