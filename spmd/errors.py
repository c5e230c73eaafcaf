"""The exceptions that the package raises.

A message says what was got, what was expected, where (argument path, operator, file:line) and what to do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_shown = int(os.environ.get("SPMD_SHOW_INTERNALS", "0") not in ("", "0"))
"""How many wishes there are, in all threads, that tracebacks have all frames."""


@contextlib.contextmanager
def show_internals() -> Iterator[None]:
    """Keep the frames of this package and of torch in tracebacks, in a `with` block.

    Errors of a function under `jit` or `shard_map` have only the user's frames otherwise. It holds for all threads;
    `SPMD_SHOW_INTERNALS=1` in the environment is for the whole process. Modelled on `jax_traceback_filtering`.

    >>> import spmd
    >>> with spmd.errors.show_internals():
    ...     mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    """
    global _shown
    _shown += 1
    try:
        yield
    finally:
        _shown -= 1


def shows_internals() -> bool:
    """Whether tracebacks have all frames."""
    return _shown > 0


class SpmdError(Exception):
    """Base class of all errors raised by `spmd`.

    Attributes:
        on_all_ranks: whether all ranks know of the error, because it came out of a comparison of them.
        is_of_others: whether it says that a collective failed, of which another rank is the cause.
    """

    on_all_ranks = False
    is_of_others = False


class MeshError(SpmdError):
    """A mesh is malformed, missing, not available, or differs from the one that was expected."""


class ShardingError(SpmdError):
    """A spec does not fit its mesh, its tensor, or the value that was given."""


class RuleError(SpmdError):
    """An operator has no sharding rule, or a rule is wrong about its operator."""


class TraceError(SpmdError):
    """A function cannot be traced into one static program."""


class PlanError(SpmdError):
    """No plan meets the constraints, a plan exceeds the limits of `comms`, or a saved plan or an option is invalid."""


class DivergenceError(SpmdError):
    """Ranks make different calls, or have different programs or values where they must be equal."""


class CheckpointError(SpmdError):
    """A checkpoint cannot be written or read, or does not hold what is asked of it."""


class DamagedError(CheckpointError):
    """A checkpoint is not complete, or its bytes are not those that were written."""
