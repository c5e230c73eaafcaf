"""What became of one program."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs


class Status(str, Enum):
    """What became of a program."""

    SKIPPED = "skipped"  # plain torch ends the process
    RIGHT = "right"
    REFUSED = "refused"  # an error of this package's own
    WRONG = "wrong"
    COMMS = "comms"  # collectives that the plan does not say, or the reverse
    CRASH = "crash"  # another exception, or the process ended
    HANG = "hang"


BAD = frozenset({Status.WRONG, Status.COMMS, Status.CRASH, Status.HANG})
"""What there must be none of."""


@attrs.frozen
class Outcome:
    """The result of one program.

    Args:
        seed: of the program.
        status: what became of it.
        kind: the same for failures of one cause: for an exception its class and its message without numbers and names.
        message: what was seen.
        transform: that it ran under.
        operators: of the pool, each once.
        planned: operators of the planned program and kinds of its collectives, each once.
        values: how many tensors of how many elements from 2 there were: arguments and intermediate values.
        strided: how many of those were not contiguous.
        uneven, empty: whether shards of an argument differ in shape, and whether one is empty.
        partial: whether an argument or a result is partial.
        ranks: of the mesh.
        collectives: how many ran.
        seconds: that it took in all, and of that to generate it.
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
