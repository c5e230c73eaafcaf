"""Every error that the package raises on purpose.

A message says what was got, what was expected, where (argument path, operator, file:line) and what to do.
"""


class SpmdError(Exception):
    """Base class of all errors raised by `spmd`."""


class MeshError(SpmdError):
    """A mesh is malformed, missing, or differs from the one that was expected."""


class ShardingError(SpmdError):
    """A spec does not fit its mesh, its tensor, or the value that was given."""


class RuleError(SpmdError):
    """An operator has no sharding rule, or a rule is wrong about its operator."""


class TraceError(SpmdError):
    """A function cannot be traced into one static program."""


class PlanError(SpmdError):
    """No plan meets the constraints, or the plan does what the user forbade."""


class DivergenceError(SpmdError):
    """Ranks hold different programs, or different values where they must be the same."""


class CheckpointError(SpmdError):
    """A checkpoint cannot be written or read, or does not hold what is asked of it."""
