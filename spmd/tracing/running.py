"""The trace that is running, and what others ask of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from spmd.core.mesh import Coordinate
from spmd.ir.graph import Operation, Value
from spmd.ir.variants import Unevenness

_tracing: ContextVar[RunningTrace | None] = ContextVar("spmd_tracing", default=None)


class Observer(Protocol):
    """What follows a trace, operation by operation."""

    def add(self, operation: Operation) -> None:
        """Take note of an operation that was recorded."""

    def check_result(self, value: Value) -> None:
        """Check a result of the function."""


class Records(Protocol):
    """The operations that a trace has recorded, and what follows them, if anything does."""

    operations: list[Operation]
    observer: Observer | None


class RunningTrace(Protocol):
    """What manual regions ask of the trace in which they run; `spmd.api.uncompiled` has one of real tensors.

    Attributes:
        coordinate: that of the rank with whose shards manual regions run; None for zero.
        unevenness: how the shapes of shards in manual regions differ between ranks; None if they do not.
        in_backward: makes the context in which Python code of backward passes runs.
        gather: returns a Python value of every rank, in rank order, where each rank runs by itself; None in a trace,
            which is for all ranks.
        in_backward: makes the context in which Python code of backward passes runs.
    """

    unevenness: Unevenness | None
    in_backward: Callable[[], contextlib.AbstractContextManager[None]]

    @property
    def gather(self) -> Callable[[Any], list[Any]] | None: ...

    @property
    def coordinate(self) -> Coordinate | None: ...

    @property
    def recorder(self) -> Records: ...

    def value(self, tensor: torch.Tensor) -> Value:
        """The value of a tensor as it is now."""

    def lift(self, leaf: Any) -> Any:
        """The tensor of the trace for one from outside; any other value unchanged."""


def is_tracing() -> bool:
    """Whether a function is being traced; a jitted function that is called meanwhile is inlined into the trace."""
    return _tracing.get() is not None


def running_trace() -> RunningTrace:
    """What knows the values of the tensors of the trace that is running."""
    found = _tracing.get()
    assert found is not None, "no function is being traced"
    return found


@contextlib.contextmanager
def tracing_with(trace: RunningTrace) -> Iterator[None]:
    """A context in which a trace is running."""
    token = _tracing.set(trace)
    try:
        yield
    finally:
        _tracing.reset(token)
