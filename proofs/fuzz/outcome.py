"""The outcome of checking one program."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs


class Status(str, Enum):
    """The status of a program."""

    SKIPPED = "skipped"  # plain torch crashes or hangs, or an operator is to be avoided
    RIGHT = "right"
    REFUSED = "refused"  # this package raised one of its own errors
    WRONG = "wrong"
    COMMS = "comms"  # the collectives that ran are not those of the plan
    CRASH = "crash"  # another exception, or the process ended
    HANG = "hang"


BAD = frozenset({Status.WRONG, Status.COMMS, Status.CRASH, Status.HANG})
"""The statuses that are failures."""


@attrs.frozen
class Outcome:
    """The result of one program.

    Args:
        seed: the seed of the program.
        status: its status.
        kind: equal for failures of one cause: for an exception, its class and its message without numbers and names.
        message: the full message of a failure.
        transform: the transform that the program ran under.
        operators: operators of the pool, each once.
        planned: operators of the planned program and kinds of its collectives, each once.
        values: the number of arguments and intermediate values with two or more elements.
        strided: how many of those were not contiguous.
        uneven, empty: whether shards of an argument differ in shape, and whether one is empty.
        partial: whether an argument or a result is partial.
        ranks: the number of ranks of the mesh.
        collectives: how many collectives ran.
        seconds: processor seconds in all; `generating` is the share of generating the program.
    """

    seed: int
    status: Status = attrs.field(converter=Status)
    kind: str = ""
    message: str = ""
    transform: str = ""
    operators: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    values: int = 0
    strided: int = 0
    uneven: bool = False
    empty: bool = False
    partial: bool = False
    ranks: int = 0
    collectives: int = 0
    seconds: float = 0.0
    generating: float = 0.0

    def data(self) -> dict[str, Any]:
        """The outcome as JSON data."""
        return {**attrs.asdict(self), "status": self.status.value}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Outcome:
        """The inverse of `data`."""
        return cls(**{**data, "operators": tuple(data["operators"]), "planned": tuple(data["planned"])})
