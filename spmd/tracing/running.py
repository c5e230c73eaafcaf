"""The kind of a call of a function under `jit` or `shard_map`: in a running trace, as written, or compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import attrs
import torch
from torch.overrides import TorchFunctionMode

from spmd.collectives.axis_types import AxisType
from spmd.core.mesh import Coordinate
from spmd.ir.graph import Operation, Value
from spmd.ir.variants import Unevenness

_running: ContextVar[RunningTrace | AsWritten | None] = ContextVar("spmd_running", default=None)
"""The trace of which a call becomes a part, or that calls run as they are written; None where they are compiled."""


class Observer(Protocol):
    """What follows a trace, operation by operation."""

    def add(self, operation: Operation) -> None:
        """Take note of an operation that was recorded."""

    def declare_constant(self, value: Value) -> None:
        """Take note that a value depends on no data."""

    def check_result(self, value: Value) -> None:
        """Check a result of the function."""


class Records(Protocol):
    """The operations that a trace has recorded, and what follows them, if anything does."""

    operations: list[Operation]
    observer: Observer | None


class RunningTrace(Protocol):
    """What manual regions ask of the trace in which they run; `spmd.api.uncompiled` has one of real tensors.

    Attributes:
        functions: the names of the autograd.Functions of the user's that were called.
        coordinate: that of the rank with whose shards manual regions run; None for zero.
        unevenness: how the shapes of shards in manual regions differ between ranks; None if they do not.
        in_backward: makes the context in which Python code of backward passes runs.
        gather: returns a Python value of every rank, in rank order, where each rank runs by itself; None in a trace,
            which is for all ranks.
    """

    functions: list[str]
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

    def take(self, leaf: torch.Tensor) -> torch.Tensor:
        """The tensor of the trace for one that a function names, also from a trace around this one."""

    def cast(self, leaf: torch.Tensor, casts: Sequence[tuple[str, AxisType]]) -> torch.Tensor | None:
        """A tensor cast along axes, where that is done around the trace; None where it is an operation of it."""


@attrs.frozen
class AsWritten:
    """Says that functions run as they are written, under `disable_jit`.

    Args:
        transforms: the transforms around the call of a function that runs on whole tensors; None outside of such ones.
    """

    transforms: tuple[int, int] | None = None


def running() -> RunningTrace | AsWritten | None:
    """The trace of which a call becomes a part, or that it runs as it is written; None where it is compiled."""
    return _running.get()


def is_tracing() -> bool:
    """Whether a function is being traced; a jitted function that is called meanwhile is inlined into the trace."""
    found = _running.get()
    return found is not None and type(found) is not AsWritten


def running_trace() -> RunningTrace:
    """What knows the values of the tensors of the trace that is running."""
    found = _running.get()
    assert found is not None and not isinstance(found, AsWritten), "no function is being traced"
    return found


def function_modes() -> list[TorchFunctionMode]:
    """The modes that see torch functions which are called now, outermost first."""
    return [torch._C._get_function_stack_at(number) for number in range(torch._C._len_torch_function_stack())]


@contextlib.contextmanager
def running_in(what: RunningTrace | AsWritten) -> Iterator[None]:
    """A context in which a trace is running, or functions run as they are written."""
    token = _running.set(what)
    try:
        yield
    finally:
        _running.reset(token)
