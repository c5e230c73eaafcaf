"""Detects side effects that a traced function may not have: lasting changes of torch's state, and rebound tensors.

A program consists of operators only, so such a change would be made while the function is traced and in no later call.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from spmd.errors import TraceError
from spmd.ir.source import Source
from spmd.job.user_code import is_user_file
from spmd.tracing.recorder import where
from spmd.tracing.source import source_at, user_source
from spmd.tracing.torch_state import GENERATOR, TorchState, generators, same_states


class Generators:
    """Watches torch's default generators during a trace: only random operators of the program may change their state.

    The generators start from an unusual seed and are seeded with the next integer at each random operator. A state that
    differs was set by the function, as `torch.utils.checkpoint` does to draw the same numbers twice.
    """

    def __init__(self) -> None:
        self._seed = _FIRST_SEED
        self._expected: tuple[torch.Tensor, ...] = ()

    def start(self) -> None:
        """Seed the generators for the trace; the caller must restore their states afterwards."""
        self._move()

    def _move(self) -> None:
        self._seed += 1
        used = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        for generator in (torch.default_generator, *used):
            generator.manual_seed(self._seed)
        self._expected = generators()

    def draw(self, op: torch._ops.OpOverload, source: Source | None) -> None:
        """Register a random operator of the program.

        Raises:
            TraceError: the function has seeded the generators or set their state since the last random operator.
        """
        if self.are_changed():
            raise TraceError(
                f"{op} at {where(source)} draws random numbers after the function has seeded the generator or set its "
                "state, which a program cannot do. Call torch.manual_seed before the jitted function."
            )
        self._move()

    def are_changed(self) -> bool:
        """Whether anything but a random operator of the program has changed the generators."""
        return not same_states(self._expected, generators())


_FIRST_SEED = 0x5EED_0F_5EED_0F


def refuse_changes(before: TorchState, draws: Generators, again: Callable[[], object]) -> None:
    """Check that torch's state after a function is traced equals the state before.

    Args:
        before: the state before.
        draws: the generators of the trace.
        again: calls the function once more, to find the line that changes the state.

    Raises:
        TraceError: the function has changed torch's state; the message names what, and the line.
    """
    names = _changed(before, draws)
    if not names:
        return
    before.restore()
    draws.start()
    source = _line_of_change(again, lambda: not set(names).isdisjoint(_changed(before, draws)))
    remedy = " or within a `with` block that undoes it"
    if GENERATOR in names:
        remedy = ": torch.manual_seed before a call draws the numbers of one device after the same seed"
    raise TraceError(
        f"The function under jit changes {' and '.join(names)} at {where(source)}, and leaves it so. A program holds "
        "operators only: the change would be made when the function is traced, and in no later call. Make it before "
        f"the call{remedy}."
    )


def _changed(before: TorchState, draws: Generators) -> tuple[str, ...]:
    names = tuple(name for name in before.changed() if name != GENERATOR)
    return (*names, GENERATOR) if draws.are_changed() else names


class _Watch:
    """A Python trace function (`sys.settrace`) that finds the user's line after which the state stays changed."""

    def __init__(self, is_changed: Callable[[], bool]) -> None:
        self._is_changed, self._was_changed = is_changed, False
        self._line: tuple[str, int] | None = None
        self.found: tuple[str, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> _Watch | None:
        """Called before each line, and at each return."""
        if not is_user_file(frame.f_code.co_filename):
            return None
        sys.settrace(None)
        changed = self._is_changed()
        if changed and not self._was_changed:
            self.found = self._line
        self._was_changed, self._line = changed, (frame.f_code.co_filename, frame.f_lineno)
        sys.settrace(self)
        return self


def _line_of_change(again: Callable[[], object], is_changed: Callable[[], bool]) -> Source | None:
    watch, before, collects = _Watch(is_changed), sys.gettrace(), gc.isenabled()
    gc.disable()  # finalizers that a collection runs are not lines of the function
    sys.settrace(watch)
    try:
        again()
    except Exception:  # this second run only serves to find the line
        return None
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return None if watch.found is None else source_at(*watch.found)


_Tensor: Any = torch.Tensor
_REBINDS = {
    _Tensor.data.__set__: "gives x other memory. Write x = value, or x.copy_(value) to write into it",
    _Tensor.grad.__set__: "keeps a gradient on a tensor. Return it: torch.func.grad",
}


def refuse_rebinding(func: Any, args: tuple[Any, ...], is_outside: Callable[[Any], bool]) -> None:
    """Raise TraceError for a write to `data`, `grad` or `requires_grad` of a tensor: only the trace would do it.

    Args:
        func: the function that `__torch_function__` has received.
        args: its arguments.
        is_outside: tells whether a tensor was made outside of the trace; `requires_grad` may be set on others.
    """
    name = getattr(getattr(func, "__self__", func), "__name__", "")
    line = where(user_source())
    if func in _REBINDS:
        raise TraceError(f"x.{name} = ... at {line} {_REBINDS[func]}.")
    if func in (_Tensor.requires_grad.__set__, _Tensor.requires_grad_) and is_outside(args[0]):
        raise TraceError(
            f"{name} at {line} is set on a closed-over tensor, which no call but the first would do. Set it before, or "
            "leave it: torch.func.grad needs no flag."
        )
