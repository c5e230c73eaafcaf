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
        self._programs: OrderedDict[tuple[Hashable, int], Program] = OrderedDict()

    def get(self, key: Hashable, fits: Callable[[Program], bool] = lambda program: True) -> Program | None:
        """The first program of a key that fits, which is the most recently used one then.

        Raises:
            TypeError: a key without a hash.
        """
        for number, program in enumerate(self.every(key)):
            if fits(program):
                self.hits += 1
                self._programs.move_to_end((key, number))
                return program
        return None

    def every(self, key: Hashable) -> Iterator[Program]:
        """The programs of a key."""
        numbered = (self._programs.get((key, number)) for number in itertools.count())
        return itertools.takewhile(lambda program: program is not None, numbered)  # type: ignore[arg-type]

    def add(self, key: Hashable, program: Program) -> None:
        """Add a program, and drop the least recently used one if there are too many."""
        self._misses += 1
        self._programs[key, len(list(self.every(key)))] = program
        if len(self._programs) > MAXSIZE:
            self._programs.popitem(last=False)

    def drop(self, key: Hashable) -> None:
        """Drop the programs of a key."""
        for number in range(len(list(self.every(key)))):
            del self._programs[key, number]

    def clear(self) -> None:
        """Drop all programs, and count from zero again."""
        self._programs.clear()
        self.hits = self._misses = 0

    @property
    def info(self) -> CacheInfo:
        """Its state."""
        return CacheInfo(self.hits, self._misses, MAXSIZE, len(self._programs))
