"""The place where a loop or a branch is called: in a trace, or where tensors have values."""

from __future__ import annotations

from spmd.tracing.running import is_tracing, running_trace


def in_program() -> bool:
    """Test for a trace, whose program gets an operation; else Python runs the loop or the branch, on each rank."""
    return is_tracing() and running_trace().gather is None
