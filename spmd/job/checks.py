"""How often ranks compare what they are about to do: chosen by `init(check=...)`, or by an environment variable."""

from __future__ import annotations

import os

from spmd.errors import MeshError

FIRST, CALLS = "first", "calls"
"""Compare the first call of each function, or every call."""

VARIABLE = "SPMD_CHECK"
"""The environment variable that is read where `init` is not told."""

every_call = False
"""Whether every call is compared."""

_is_given = False


def choose(check: str | None) -> None:
    """Choose what is compared; None leaves an earlier choice, or takes that of the environment variable.

    Raises:
        MeshError: no such choice.
    """
    global every_call, _is_given
    if check is None and _is_given:
        return
    chosen = (os.environ.get(VARIABLE) or FIRST) if check is None else check
    if chosen not in (FIRST, CALLS):
        what = f"The environment variable {VARIABLE}" if check is None else "check"
        raise MeshError(f"{what} must be {FIRST!r} or {CALLS!r} (got {chosen!r}).")
    every_call, _is_given = chosen == CALLS, check is not None
