"""Ranges of `torch.profiler` in the program of a rank: the user's `record_function` blocks, and collectives."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, TypeVar

import attrs
from torch.autograd import profiler

from spmd.ir.graph import Operation
from spmd.ir.source import Range

R = TypeVar("R")


def collective_range(operation: Operation) -> tuple[Range, ...]:
    """The range of a collective, named as in the plan, or of its start or its finish; none of another operation."""
    comm = operation.annotations.comm
    if comm is None:
        return ()
    part = operation.op.__name__ if isinstance(operation.op, MethodType) else ""
    return (Range(f"{part} {comm}".strip(), id(operation), is_collective=True),)


def common(every: Iterable[Sequence[Range]]) -> tuple[Range, ...]:
    """The ranges that all of several sequences of nested ones begin with."""
    columns = zip(*every, strict=False)
    return tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


@attrs.frozen
class InRanges:
    """An operator with an effect, and the ranges that the runtime opens around it."""

    op: Any
    names: tuple[str, ...] = attrs.field(eq=False)

    def __call__(self, run: Callable[[Any], R]) -> R:
        """The result of `run(op)`, run in the ranges."""
        with contextlib.ExitStack() as stack:
            for name in self.names:
                stack.enter_context(profiler.record_function(name))
            return run(self.op)


def enter(name: str) -> profiler.record_function:
    """Open a range."""
    opened = profiler.record_function(name)
    opened.__enter__()
    return opened


def leave(opened: profiler.record_function) -> None:
    """Close a range."""
    opened.__exit__(None, None, None)
