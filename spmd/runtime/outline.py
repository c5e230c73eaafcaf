"""Functions for the parts of a generated program that it repeats, as equal layers: Python compiles each of them once.

Copies are equal if their lines are, up to the names of variables and globals. What dies in a part is passed in a list
that the part empties, so that it is freed there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

import attrs

from spmd.core.runs import Run, disjoint_runs
from spmd.ir.graph import Operation

LEAST_SAVED = 1000
"""Parts are outlined where this makes the source at least so many lines shorter."""

Origins: TypeAlias = dict[tuple[int, ...], Operation]
"""The operation of each line that runs one; of a line of a part by the line of the call and its own."""

_NAME = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\b([gnrtv]\d+\w*|results)\b""")
"""A string, or the name of a variable or of a global."""

_REGION = re.compile(r"    (for t\d|while |if )")
_FURTHER = re.compile(r"def|     |    else:|    del ")
"""The begin of a line that goes with the line before it."""

_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")


@attrs.frozen(eq=False)
class Outlined:
    """A program with functions: its lines, the operations of these, and the names of the functions."""

    lines: list[str]
    origins: Origins
    parts: tuple[str, ...]


def outline(lines: Sequence[str], origins: Mapping[int, Operation]) -> Outlined:
    """Move the repeated parts of a program to functions.

    Args:
        lines: the program: the line of its `def`, and its statements.
        origins: the operations of lines, which are numbered from 1.
    """
    parts = _parts(lines)
    made = [line for part in parts for line in part.lines]
    found: Origins = {}
    names = tuple(part.name for part in parts)
    made.append(lines[0].replace("):", f"{''.join(f', {name}={name}' for name in names)}):"))

    def keep(begin: int, end: int) -> None:
        """Copy lines as they are."""
        for line in range(begin, end):
            made.append(lines[line])
            if line + 1 in origins:
                found[(len(made),)] = origins[line + 1]

    done, begin = 1, 1
    for part in parts:
        body = begin + len(part.head)
        for copy in part.copies:
            keep(done, copy.begin)
            made += part.call(copy)
            for place in range(copy.end - copy.begin):
                if (operation := origins.get(copy.begin + place + 1)) is not None:
                    found[len(made), body + place] = operation
            done = copy.end
        begin += len(part.lines)
    keep(done, len(lines))
    return Outlined(made, found, names)


def _parts(lines: Sequence[str]) -> list[_Function]:
    """The repeated parts of a program, in order."""
    if len(lines) <= LEAST_SAVED:
        return []
    begins = [number for number, line in enumerate(lines) if not _FURTHER.match(line)]
    bounds = [*begins, len(lines)]
    known: dict[str, int] = {}

    def token(number: int) -> int:
        """Equal for statements that are equal but for numbers; another for each that may leave variables unassigned."""
        text = "\n".join(lines[begins[number] : bounds[number + 1]])
        return -number if _REGION.match(text) else known.setdefault(text.translate(_WITHOUT_DIGITS), len(known) + 1)

    def copies(run: Run) -> list[_Copy]:
        return [
            _Copy(lines, bounds[place], bounds[place + run.period]) for place in range(run.begin, run.end, run.period)
        ]

    def alike(run: Run) -> Iterator[Run]:
        if bounds[run.end - run.period] - bounds[run.begin] > LEAST_SAVED:
            yield from run.grouped(
                [len([*group]) for _, group in itertools.groupby(copies(run), lambda copy: copy.form)]
            )

    runs = disjoint_runs([*map(token, range(len(begins)))], alike)
    return [_Function(f"part{number}", tuple(copies(run))) for number, run in enumerate(runs)]


class _Copy:
    """The lines of one copy of a part, without their names, and the names in order of appearance."""

    def __init__(self, lines: Sequence[str], begin: int, end: int) -> None:
        self.lines, self.begin, self.end = lines[begin:end], begin, end
        numbers: dict[str, int] = {}
        shape = _NAME.sub(
            lambda found: found[1] or f"${numbers.setdefault(found[2], len(numbers))}", "\n".join(self.lines)
        )
        self.form, self.names = shape, tuple(numbers)

    def listed(self, numbers: Sequence[int]) -> str:
        """Names by number, each with a comma behind it."""
        return "".join(f"{self.names[number]}, " for number in numbers)


class _Function:
    """A function for a part.

    It takes a list of variables that die in it, which it empties, and others; it returns those that are made for what
    comes after it. All are numbers of names of a copy.
    """

    def __init__(self, name: str, copies: Sequence[_Copy]) -> None:
        self.name, self.copies = name, copies
        names = copies[0].names
        taken: dict[str, None] = {}
        made: dict[str, None] = {}
        changed: set[str] = set()
        for variable, use in itertools.chain.from_iterable(map(_uses, copies[0].lines)):
            if use is not _Use.WRITE and variable not in changed:
                taken[variable] = None
            if use is not _Use.READ:
                changed.add(variable)
                made.pop(variable, None)
            if use is _Use.WRITE and not variable.startswith("t"):  # the number of a trip is read in its loop only
                made[variable] = None
        common = {
            each for each in taken if each[0] == "g" and len({copy.names[names.index(each)] for copy in copies}) == 1
        }
        number = names.index
        self.dying = [number(each) for each in taken if each in changed]
        self.given = [number(each) for each in taken if each not in changed and each not in common]
        self.made = [number(each) for each in made]
        self.yields = any(" yield " in line for line in copies[0].lines)

    @property
    def lines(self) -> list[str]:
        """The lines of the function."""
        copy = self.copies[0]
        result = [f"    return ({copy.listed(self.made)})"] if self.made else []
        return [*self.head, *copy.lines, *result]

    @property
    def head(self) -> list[str]:
        """The lines before those of the part."""
        copy = self.copies[0]
        taken = [f"    [{copy.listed(self.dying)}] = held", "    held.clear()"] if self.dying else []
        return [f"def {self.name}(held, {copy.listed(self.given)}):", *taken]

    def call(self, copy: _Copy) -> list[str]:
        """The lines that stand for a copy; the last one is the call."""
        dying = copy.listed(self.dying)
        target = f"{copy.listed(self.made)} = " if self.made else ""
        call = f"{'yield from ' if self.yields else ''}{self.name}(held, {copy.listed(self.given)})"
        return [f"    held = [{dying}]", *([f"    del {dying}"] if dying else []), f"    {target}{call}"]


class _Use(Enum):
    READ = "read"
    WRITE = "write"
    DELETE = "delete"


def _uses(line: str) -> Iterator[tuple[str, _Use]]:
    """What a line does to which variables, in order."""
    line = _NAME.sub(lambda found: found[2] or "", line.strip())
    if line.startswith("del "):
        yield from ((name, _Use.DELETE) for name in _names(line))
        return
    target, _, value = line.removeprefix("for ").partition(" in " if line.startswith("for ") else " = ")
    if not value:
        target, value = "", target
    yield from ((name, _Use.READ) for name in _names(value))
    for found in _NAME.finditer(target):
        yield found[2], _Use.READ if target[found.end() : found.end() + 1] == "[" else _Use.WRITE


def _names(text: str) -> Iterator[str]:
    return (found[2] for found in _NAME.finditer(text))
