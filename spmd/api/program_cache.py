"""What one jitted function has compiled, by signature: so many programs, of which the least recently used one goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
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
    """Programs by key; ranks that make the same calls drop the same ones."""

    def __init__(self) -> None:
        self.hits = 0
        self._misses = 0
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()

    def get(self, key: Hashable) -> Program | None:
        """The program of a key, which is the most recently used one then; TypeError for a key without a hash."""
        found = self._programs.get(key)
        if found is not None:
            self.hits += 1
            self._programs.move_to_end(key)
        return found

    def add(self, key: Hashable, program: Program) -> None:
        """Add a program, and drop the least recently used one if there are too many."""
        self._misses += 1
        self._programs[key] = program
        if len(self._programs) > MAXSIZE:
            self._programs.popitem(last=False)

    def clear(self) -> None:
        """Drop all programs, and count from zero again."""
        self._programs.clear()
        self.hits = self._misses = 0

    @property
    def info(self) -> CacheInfo:
        """Its state."""
        return CacheInfo(self.hits, self._misses, MAXSIZE, len(self._programs))
