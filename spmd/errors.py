"""The exceptions that the package raises.

A message says what was got, what was expected, where (argument path, operator, file:line) and what to do.
"""


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
