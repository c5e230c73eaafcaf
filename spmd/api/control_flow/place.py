"""The place where a loop or a branch is called: in a trace, or where tensors have values."""

from __future__ import annotations

import enum

from spmd.tracing.running import is_tracing, running_trace


class CallPlace(enum.Enum):
    """Where a loop or a branch is called.

    Attributes:
        PROGRAM: in a trace, whose program it becomes an operation of.
        VALUES: where tensors have values: Python runs it. On each rank, in a body that is not compiled.
    """

    PROGRAM = enum.auto()
    VALUES = enum.auto()


def here() -> CallPlace:
    """The place of this call."""
    if not is_tracing() or running_trace().gather is not None:
        return CallPlace.VALUES
    return CallPlace.PROGRAM
