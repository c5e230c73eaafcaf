"""Detects side effects that a traced function may not have: lasting changes of torch's state, and rebound tensors.

A program consists of operators only, so such a change would be made while the function is traced and in no later call.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmd.errors import TraceError
from spmd.ir.source import Source
from spmd.job.user_code import is_user_file
from spmd.tracing.draw_scopes import draw_scope
from spmd.tracing.source import source_at, user_source, where
from spmd.tracing.torch_state import GENERATOR, Setting, TorchState


class Generators:
    """Notices that a traced function seeds torch's default generators or sets their state: in a trace neither happens.

    So other threads that draw meanwhile draw what they would without the trace. Where the function draws by keys, they
    are those of the seed, or of the position at which a state was read.
    """

    def __init__(self) -> None:
        self._line: Source | None = None
        self._is_changed = False
        self._drawn = 0
        self._states: list[tuple[torch.Tensor, bool, Any]] = []  # read, if there was a change before, and where

    def note(self, state: torch.Tensor | None = None, seed: int | None = None) -> None:
        """Note that the function seeds a generator, or sets its state: to one that it has read before is no change.

        Raises:
            TraceError: it has drawn since, or sets another state where it draws by keys.
        """
        scope, self._line = draw_scope(), user_source()
        found = self._read(state)
        self._is_changed = found is None or found[0]
        if scope is None:
            if found is not None and found[1] != self._drawn:
                raise TraceError(
                    f"The state of the generator is set back at {where(self._line)} after draws, which a program "
                    "cannot draw again: its generator goes on. Draw once and use the numbers twice, or draw by keys: "
                    'spmd.jit(..., rng="counter").'
                )
        elif found is not None:
            scope.restore(found[1])
        elif seed is not None:
            scope.reseed(seed)
        else:
            raise TraceError(
                f'A state of a generator is set at {where(self._line)}, and rng="counter" draws by keys. Call '
                "torch.manual_seed(seed) in torch.random.fork_rng(), or draw by a key: spmd.random.key(seed)."
            )

    def _read(self, state: torch.Tensor | None) -> tuple[bool, Any] | None:
        """If there was a change before a state was read, and the position there; None if it was not read."""
        if state is None:
            return None
        with _without_modes():
            same = [(changed, at) for known, changed, at in self._states if known is state]
            equal = lambda known: known.shape == state.shape and torch.equal(known, state)  # noqa: E731
            return next(iter(same), None) or next(
                ((changed, at) for known, changed, at in self._states if equal(known)), None
            )

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """Remember a state that the function reads, and return it."""
        scope = draw_scope()
        self._states.append((state, self._is_changed, self._drawn if scope is None else scope.position))
        return state

    def draw(self, op: torch._ops.OpOverload, source: Source | None) -> None:
        """Check that a random operator draws what it would outside of a trace.

        Raises:
            TraceError: the function has seeded the generators or set their state.
        """
        if self._is_changed:
            raise TraceError(
                f"{op} at {where(source)} draws random numbers after the function has seeded the generator or set its "
                "state, which a program cannot do. Call torch.manual_seed before the jitted function."
            )
        self._drawn += 1

    def refuse_changes(self) -> None:
        """Raise TraceError if the function leaves the generators changed."""
        if self._is_changed:
            raise _left_so((GENERATOR,), self._line)


_generators: ContextVar[Generators | None] = ContextVar("spmd_traced_generators", default=None)


@contextlib.contextmanager
def noticing(generators: Generators) -> Iterator[None]:
    """A context in which this thread does not change torch's default generators: what it would do is noted."""
    token = _generators.set(generators)
    try:
        yield
    finally:
        _generators.reset(token)


class _DefaultGenerator:
    """The default generator of the CPU, as the functions of `torch.random` use it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def manual_seed(self, seed: int) -> torch.Generator:
        traced = _generators.get()
        if traced is None:
            return torch.default_generator.manual_seed(seed)
        traced.note(seed=seed)
        return torch.default_generator

    def seed(self) -> int:
        traced = _generators.get()
        if traced is None:
            return torch.default_generator.seed()
        traced.note()
        return torch.default_generator.initial_seed()

    def set_state(self, state: torch.Tensor) -> Any:
        traced = _generators.get()
        return torch.default_generator.set_state(state) if traced is None else traced.note(state)

    def get_state(self) -> torch.Tensor:
        traced = _generators.get()
        if traced is None:
            return torch.default_generator.get_state()
        with _without_modes():
            return traced.read(torch.default_generator.get_state())


_lazy_call = torch.cuda.random._lazy_call


def _set_on_cuda(change: Callable[[], None], **kwargs: Any) -> None:
    """The hook by which `torch.cuda.random` seeds generators or sets their states."""
    traced = _generators.get()
    if traced is None:
        _lazy_call(change, **kwargs)
        return
    cells = (cell.cell_contents for cell in change.__closure__ or ())
    state = next((value for value in cells if isinstance(value, torch.Tensor)), None)
    if state is not None and torch.cuda.is_initialized():
        with _without_modes():
            for generator in torch.cuda.default_generators:
                traced.read(generator.get_state())
    if state is not None or torch.cuda.is_initialized():
        traced.note(state)


# Once, and not in each trace: other threads may seed and draw meanwhile.
torch.random.default_generator = _DefaultGenerator()  # type: ignore[assignment]
torch.cuda.random._lazy_call = _set_on_cuda  # type: ignore[assignment]


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def refuse_changes(before: TorchState, again: Callable[[], object]) -> None:
    """Check that a function that was traced has left torch's state as it was.

    Args:
        before: the state before.
        again: calls the function once more, to find the line that changes the state.

    Raises:
        TraceError: the function has changed torch's state; the message names what, and the line.
    """
    changed = before.changed()
    if not changed:
        return
    own, shared = [s for s in changed if not s.setters], [s for s in changed if s.setters]
    before.restore()
    watch = _Tracer(lambda: not set(own).isdisjoint(before.changed()), shared)
    _call_watched(again, watch)
    shared = [setting for setting in shared if setting in watch.set_by]  # others were set by other threads
    if not own and not shared:
        return
    before.restore(shared)
    lines = [watch.found, *(watch.set_by[setting] for setting in shared)]
    line = next((line for line in lines if line is not None), None)
    raise _left_so([s.name for s in (*own, *shared)], None if line is None else source_at(*line))


def _left_so(names: Sequence[str], source: Source | None) -> TraceError:
    remedy = " or within a `with` block that undoes it"
    if GENERATOR in names:
        remedy = ": torch.manual_seed before a call draws the numbers of one device after the same seed"
    return TraceError(
        f"The function under jit changes {' and '.join(names)} at {where(source)}, and leaves it so. A program holds "
        "operators only: the change would be made when the function is traced, and in no later call. Make it before "
        f"the call{remedy}."
    )


class _Tracer:
    """A function for `sys.settrace` and `sys.setprofile`, which see this thread only.

    Args:
        is_changed: whether a state of this thread is changed.
        shared: settings of all threads.

    Attributes:
        found: the user's line after which the thread's state stays changed.
        set_by: the user's line that last set each of the shared settings.
    """

    def __init__(self, is_changed: Callable[[], bool], shared: Sequence[Setting]) -> None:
        self._is_changed, self._was_changed, self._shared = is_changed, False, shared
        self._line: tuple[str, int] | None = None
        self.found: tuple[str, int] | None = None
        self.set_by: dict[Setting, tuple[str, int] | None] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> _Tracer | None:
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

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Called before each call of a C function."""
        name = getattr(arg, "__name__", "") if event == "c_call" else ""
        for setting in self._shared:
            if name in setting.setters:
                self.set_by[setting] = self._line


def _call_watched(function: Callable[[], object], watch: _Tracer) -> None:
    before, profile, collects = sys.gettrace(), sys.getprofile(), gc.isenabled()
    gc.disable()  # finalizers that a collection runs are not lines of the function
    sys.settrace(watch)
    sys.setprofile(watch.profile)
    try:
        function()
    except Exception:  # this second run only serves to find the line
        return
    finally:
        sys.setprofile(profile)
        sys.settrace(before)
        if collects:
            gc.enable()


_Tensor: Any = torch.Tensor
_REBINDS = {
    _Tensor.data.__set__: "gives x other memory. Write x = value, or x.copy_(value) to write into it",
    _Tensor.grad.__set__: "keeps a gradient on a tensor. Return it: torch.func.grad",
}
_SETS_FLAG = frozenset({_Tensor.requires_grad.__set__, _Tensor.requires_grad_})


def refuse_rebinding(func: Any, args: tuple[Any, ...], is_outside: Callable[[Any], bool]) -> None:
    """Raise TraceError for a write to `data`, `grad` or `requires_grad` of a tensor: only the trace would do it.

    Args:
        func: the function that `__torch_function__` has received.
        args: its arguments.
        is_outside: tells whether a tensor was made outside of the trace; `requires_grad` may be set on others.
    """
    if func in _REBINDS:
        name = func.__self__.__name__
        raise TraceError(f"x.{name} = ... at {where(user_source())} {_REBINDS[func]}.")
    if func in _SETS_FLAG and is_outside(args[0]):
        name = getattr(getattr(func, "__self__", func), "__name__", "")
        raise TraceError(
            f"{name} at {where(user_source())} is set on a closed-over tensor, which no call but the first would do. "
            "Set it before, or leave it: torch.func.grad needs no flag."
        )
