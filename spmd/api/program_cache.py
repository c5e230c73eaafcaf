"""What one jitted function has compiled, by signature: so many programs, of which the least recently used one goes."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

Program = TypeVar("Program")

MAXSIZE = 128
"""The number of programs that a jitted function keeps."""


class CacheInfo(NamedTuple):
    """The state of the cache of a jitted function; the names are those of `functools.lru_cache`.

    Args:
        hits: how many calls have found their program.
        misses: how many programs were made.
        maxsize: how many are kept.
        currsize: how many are there.
    """

    hits: int
    misses: int
    maxsize: int
    currsize: int


class ProgramCache(Generic[Program]):
    """Programs by key, of which several may have one key; ranks that make the same calls drop the same ones."""

    def __init__(self) -> None:
        self.hits = 0
        self._misses = 0
        self._numbers = itertools.count()
        # A program that was dropped keeps its place, so that all ranks have the same number of places.
        self._programs: OrderedDict[int, Program | None] = OrderedDict()
        self._keys: dict[Hashable, list[int]] = {}

    def get(self, key: Hashable, fits: Callable[[Program], bool] = lambda program: True) -> Program | None:
        """The first program of a key that fits, which is the most recently used one then.

        Raises:
            TypeError: a key without a hash.
        """
        for number in self._keys.get(key, ()):
            program = self._programs[number]
            if program is not None and fits(program):
                self.hits += 1
                self._programs.move_to_end(number)
                return program
        return None

    def every(self, key: Hashable) -> Iterator[Program]:
        """The programs of a key."""
        programs = (self._programs[number] for number in tuple(self._keys.get(key, ())))
        return (program for program in programs if program is not None)

    def add(self, key: Hashable, program: Program) -> None:
        """Add a program, and drop the least recently used one if there are too many."""
        self._misses += 1
        number = next(self._numbers)
        self._programs[number] = program
        self._keys.setdefault(key, []).append(number)
        if len(self._programs) > MAXSIZE:
            oldest, _ = self._programs.popitem(last=False)
            self._keys = {k: kept for k, numbers in self._keys.items() if (kept := [n for n in numbers if n != oldest])}

    def drop(self, is_dead: Callable[[Program], bool]) -> None:
        """Drop programs that no call can find any more."""
        for number, program in self._programs.items():
            if program is not None and is_dead(program):
                self._programs[number] = None

    def clear(self) -> None:
        """Drop all programs, and count from zero again."""
        self._programs.clear()
        self._keys.clear()
        self.hits = self._misses = 0

    @property
    def info(self) -> CacheInfo:
        """Its state."""
        return CacheInfo(self.hits, self._misses, MAXSIZE, sum(p is not None for p in list(self._programs.values())))
