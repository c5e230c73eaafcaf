"""The programs with collectives that this process has run with some others: the same on all, in the same order.

They are counted and hashed where they run, which takes a fraction of a microsecond, and compared beside what ranks
compare anyway. So ranks that part after the first calls are told at the next comparison, and nothing more is sent.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import torch.distributed as dist

from spmd.job.collective_scope import who_says_what

SHOWN = 64
"""The number of last programs that are kept for messages."""


@attrs.frozen
class Ran:
    """What a process has run: how many programs, a hash of their order, and the numbers of the last ones."""

    count: int
    digest: int
    last: tuple[int, ...]


class History:
    """The programs with collectives that some processes of a job run together.

    Programs are numbered when ranks have compared them, so that a number is the same program on all ranks.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._functions = 0
        self.calls = 0  # those of jitted functions that ranks have compared
        self.forget()

    def forget(self) -> None:
        """Start again: all ranks know that they have parted."""
        self._count, self._digest = 0, 0
        self._last: deque[int] = deque(maxlen=SHOWN)

    def number(self, name: str) -> int:
        """A number for a program that is new on all ranks."""
        self._names.append(name)
        return len(self._names) - 1

    def number_function(self) -> int:
        """A number for a jitted function, in a call that all ranks have compared."""
        self._functions += 1
        return self._functions - 1

    def add(self, program: int) -> None:
        """Note that a program is about to run."""
        self._count += 1
        self._digest = hash((self._digest, program))  # the same in every process: only texts are hashed by a seed
        self._last.append(program)

    @property
    def mark(self) -> tuple[int, int]:
        """What is equal on ranks that have run the same programs."""
        return self._count, self._digest

    @property
    def ran(self) -> Ran:
        """What this process has run."""
        return Ran(self._count, self._digest, tuple(self._last))

    def difference(self, every: Mapping[int, Ran]) -> str:
        """The first program that ranks do not share, and which rank has run what."""
        counts = {rank: ran.count for rank, ran in every.items()}
        first = max(ran.count - len(ran.last) for ran in every.values())
        for number in range(first, max(counts.values())):
            rows = {rank: self._at(number, ran) for rank, ran in every.items()}
            if len(set(rows.values())) > 1:
                return f"run {number + 1} is of {who_says_what(rows)}"
        said = {rank: f"{count} programs" for rank, count in counts.items()}
        return f"{who_says_what(said)}, and they differ before the last {SHOWN}"

    def _at(self, number: int, ran: Ran) -> str:
        if number >= ran.count:
            return "no program yet"
        program = ran.last[number - ran.count]
        return f"{self._names[program]}, program {program}"


# A job that is stopped and started again, as in tests, has another world group.
_histories: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], History]] = weakref.WeakKeyDictionary()


def history(ranks: Sequence[int]) -> History:
    """The history of some processes of the job that runs now: what they have run on meshes over exactly these."""
    world = dist.group.WORLD
    assert world is not None, "make_mesh starts torch.distributed"
    return _histories.setdefault(world, {}).setdefault(tuple(sorted(ranks)), History())
