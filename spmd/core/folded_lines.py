"""The text of a program with repeated lines written once, in a `for`, as those of equal layers are.

Copies differ in numbers alone, such as those in names, each of which grows by a step of its own from copy to copy. It
is written as an expression of the loop's index, so that nothing is lost:

    for i in range(1, 79):
        mul_{9*i+3} = mul(weight_{i}, add_{6*i+1})
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from spmd.core.runs import Run, disjoint_runs, held_before

LEAST_SAVED = 24
"""Lines are folded where this makes the text at least so many lines shorter."""

_NUMBER = re.compile(r"([A-Za-z_]*)(?<!\d)(0|[1-9]\d*)(?!\d)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_MADE = re.compile(r"\s*%?(\w+)[^=]* = ")
_INSIDE = re.compile(r"\s*([)\]]|else:)")
"""The begin of a line that belongs to the lines before it."""


def fold_lines(lines: Sequence[str]) -> list[str]:
    """Lines in which every part that occurs at least three times in a row is written once.

    >>> print(*fold_lines([f"y{2 * n} = f(x{n}, y{2 * n - 2})" for n in range(1, 41)]), sep="\\n")
    for i in range(1, 41):
        y{2*i} = f(x{i}, y{2*i-2})
    """
    text = _Lines(lines)
    folded: list[str] = []
    done = 0
    for found in disjoint_runs(text.tokens, text.regular):
        run = text.aligned(found, done)
        if run is not None and -run.rank - run.period > LEAST_SAVED:
            folded += [*lines[done : run.begin], *text.loop(run)]
            done = run.end
    return [*folded, *lines[done:]]


@attrs.frozen(eq=False)
class _Number:
    """A number in the lines of a run.

    Args:
        first: what it is in the first copy.
        step: by how much it grows from copy to copy.
        name: the letters before it.
    """

    first: int
    step: int
    name: str

    @property
    def counts(self) -> bool:
        """Whether it counts the copies, up or down."""
        return abs(self.step) == 1

    def of_index(self, first: int, sign: int) -> str:
        """The number as an expression of an index that is `first` in the first copy and grows by `sign`."""
        factor = self.step * sign
        rest = self.first - factor * first
        index = "i" if abs(factor) == 1 else f"{abs(factor)}*i"
        if factor < 0:
            return f"{{{rest}-{index}}}"
        return f"{{{index}{f'{rest:+}' if rest else ''}}}"


class _Lines:
    """Lines as tokens, equal for lines that differ in numbers alone."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self.numbers = [tuple(int(number) for _, number in _NUMBER.findall(line)) for line in lines]
        known: dict[str, int] = {}
        self.tokens = [known.setdefault(_NUMBER.sub(r"\1#", line), len(known)) for line in lines]

    def regular(self, run: Run) -> Iterator[Run]:
        """The parts of a run with at least three copies in which every number grows by a step of its own."""
        if -run.rank - run.period <= LEAST_SAVED:
            return
        bounds = [(begin, begin + run.period) for begin in range(run.begin, run.end, run.period)]
        copies = [[*itertools.chain.from_iterable(self.numbers[begin:end])] for begin, end in bounds]
        steps = [[*map(int.__sub__, after, before)] for before, after in itertools.pairwise(copies)]
        sizes: list[int] = []
        end = 0
        for _, group in itertools.groupby(steps):
            begin, end = max(end, sum(sizes)), end + len(list(group))
            if end - begin >= 2:
                sizes += [1] * (begin - sum(sizes)) + [end + 1 - begin]
        yield from run.grouped(sizes + [1] * (len(copies) - sum(sizes)))

    def aligned(self, run: Run, begin: int) -> Run | None:
        """The run with copies that begin where most numbers count the same copy and the fewest values are held.

        They may be in the lines around it from `begin` on.
        """
        period, start, stop = run.period, run.begin, run.stop
        while start > begin and self.tokens[start - 1] == self.tokens[start - 1 + period]:
            start -= 1
        while stop < len(self.lines) and self.tokens[stop] == self.tokens[stop - period]:
            stop += 1
        lines = self.lines[run.begin : stop]
        last = {name: place for place, line in enumerate(lines) for name in _NAME.findall(line)}
        made = [(place, _MADE.match(line)) for place, line in enumerate(lines[:period])]
        held = held_before(period, [(place, last[found[1]]) for place, found in made if found])
        outermost = min(map(_indentation, lines))
        best = len(lines), 0, 0
        counted = Counter((each.name, each.first) for line in self.numbers_of(run) for each in line if each.counts)
        for place, numbers in enumerate(self.numbers_of(run)):
            if _indentation(lines[place]) == outermost and not _INSIDE.match(lines[place]):
                best = min(best, (len(+counted), held[place], place))
            counted.subtract((each.name, each.first) for each in numbers if each.counts)
            counted.update((each.name, each.first + each.step) for each in numbers if each.counts)
        first = max(start, begin)
        first += (run.begin + best[-1] - first) % period
        turned = Run.within(period, first, min(stop, run.end + period - 1))
        return next(itertools.chain.from_iterable(map(self.regular, turned)), None)

    def numbers_of(self, run: Run) -> list[list[_Number]]:
        """The numbers in each line of the first copy of a run."""
        found = []
        for line in range(run.begin, run.begin + run.period):
            names = [name for name, _ in _NUMBER.findall(self.lines[line])]
            pairs = zip(self.numbers[line], self.numbers[line + run.period], names, strict=True)
            found.append([_Number(first, second - first, name) for first, second, name in pairs])
        return found

    def loop(self, run: Run) -> list[str]:
        """The lines of a run: a head, and one copy."""
        numbers = [*itertools.chain.from_iterable(self.numbers_of(run))]
        indices: Counter[tuple[int, int]] = Counter()
        for each in filter(lambda each: each.counts, numbers):
            indices[each.first, each.step] += len(each.name)
        (first, sign), _ = indices.most_common(1)[0] if indices else ((0, 1), 0)
        count = -run.rank // run.period
        begin = min(first, first + sign * (count - 1))
        turns = f"range({begin}, {begin + count})" if begin else f"range({count})"
        turns = turns if sign > 0 else f"reversed({turns})"
        written = iter([each.of_index(first, sign) if each.step else str(each.first) for each in numbers])
        lines = self.lines[run.begin : run.begin + run.period]
        body = [_NUMBER.sub(lambda found: f"{found[1]}{next(written)}", line) for line in lines]
        return [f"{' ' * _indentation(lines[0])}for i in {turns}:", *(f"    {line}" for line in body)]


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())
