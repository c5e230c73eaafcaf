"""Torch's own tracers inside a trace, which would record the trace's tensors as constants.

A function under torch.compile runs eagerly, and `torch.compiler.is_compiling()` is true, as under torch.compile: models
ask it before they read values of tensors. torch.func.linearize, which records the derivative by make_fx, evaluates it
by forward mode instead, at each call of the function that it returns. Other tracers raise a TraceError.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import attrs
import torch

from spmd.core.pytree import tree_leaves
from spmd.errors import TraceError
from spmd.job.user_code import is_user_file
from spmd.tracing.higher_order import meaning_of
from spmd.tracing.linearize import recorder
from spmd.tracing.source import user_source, where

_logger = logging.getLogger("spmd")


_inlines: ContextVar[bool] = ContextVar("spmd_inlines", default=False)


@contextlib.contextmanager
def nested_tracers() -> Iterator[None]:
    """A context manager in which this thread can use torch.compile and flex_attention inside a trace."""
    _hook_tracers()
    token = _inlines.set(True)
    try:
        yield
    finally:
        _inlines.reset(token)


def _hook_tracers() -> None:
    """Hook torch's tracers, once: each hook acts in a trace, and leaves other threads to torch."""
    from torch._dynamo import eval_frame  # it takes a second

    # The function itself stays, which torch.compile knows and others may have imported by name.
    torch.compiler._spmd_inlines = _inlines.get  # type: ignore[attr-defined]
    if torch.compiler.is_compiling.__globals__ is vars(torch.compiler):  # not where a test has put another
        torch.compiler.is_compiling.__code__ = _is_compiling.__code__
    if not isinstance(eval_frame._callback_from_stance, _Stance):
        eval_frame._callback_from_stance = _Stance(eval_frame._callback_from_stance)  # type: ignore[assignment]
    module: Any = sys.modules.get(_FLEX_ATTENTION)
    if hasattr(module, "_validate_device") and not isinstance(module._validate_device, _DeviceCheck):
        module._validate_device = _DeviceCheck(module._validate_device)


def _is_compiling() -> bool:
    """The code of `torch.compiler.is_compiling`, with torch's globals: true in a trace, too."""
    if torch.jit.is_scripting():
        return False
    else:  # torch.jit.script compiles one of the branches
        return _is_compiling_flag or _spmd_inlines()  # type: ignore[name-defined]  # noqa: F821


_count_no_frames: Callable[[int], object] = getattr(
    torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", lambda count: None
)
"""Sets how many frames torch.compile with fullgraph=True has compiled; -1 where it does not count them."""


@attrs.frozen
class _Stance:
    """Control torch.compile by its stance: in a trace a function is inlined."""

    torchs: Callable[[Any], Any]

    def __call__(self, compiler: Any) -> Any:
        if not _inlines.get():
            return self.torchs(compiler)
        if compiler not in (None, False) and not _is_of_torch():
            _say_inlined(where(user_source()))
        _count_no_frames(-1)  # fullgraph=True is no promise here
        return None  # as under "force_eager"


@attrs.frozen
class _DeviceCheck:
    """The check of the operands of flex_attention; in a trace they may require grad on any device: see `inlined`.

    Torch's kernels have no backward pass on the CPU, so that it refuses operands which require grad there.
    """

    torchs: Callable[..., None]

    def __call__(self, *operands: Any) -> None:
        if not _inlines.get():
            self.torchs(*operands)


_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


def _is_of_torch() -> bool:
    """Whether torch itself compiles: for flex_attention, and for torch.cond and the like."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_globals.get("__name__", "").startswith(("torch._higher_order_ops.", _FLEX_ATTENTION)):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _say_inlined(line: str) -> None:
    """Log once for each line."""
    _logger.warning(
        "A function under torch.compile was called in one under spmd.jit at %s: its operators are part of the program, "
        "and torch.compile does nothing there. Call the function itself to be rid of this warning.",
        line,
    )


def inlined(operator: torch._ops.HigherOrderOperator) -> Callable[..., Any]:
    """What is called in place of a higher-order operator in a trace.

    `flex_attention` is its definition by operators; `torch.cond` and the like are ours. That of
    `torch.autograd.Function` under torch.func is itself.

    Raises:
        TraceError: any other one.
    """
    if operator is torch._functorch.autograd_function.custom_function_call:
        return operator
    if operator.name() == "flex_attention":
        return _attention
    meaning = meaning_of(operator)
    if meaning is not None:
        return meaning
    raise TraceError(
        f"torch.ops.higher_order.{operator.name()} at {where(user_source())} takes functions, which a program of "
        "operators cannot hold. Write spmd.cond, spmd.while_loop, spmd.scan or spmd.map, and spmd.debug.print for "
        "print."
    )


def _attention(query: Any, key: Any, value: Any, score: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """`flex_attention` by operators; what scores read of tensors is differentiable under the vmap that is in it."""
    from torch._higher_order_ops.flex_attention import math_attention

    mask = (*mask[:-1], _indexing(mask[-1]))
    return math_attention(query, key, value, _indexing(score), mask, *args, **kwargs)


def _indexing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of scores in which tensors are indexed by `aten.index`, not by the operator of torch's own mode."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    class Indexing(TransformGetItemToIndex):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            places = tree_leaves(args[1]) if func is torch.Tensor.__getitem__ else [None]
            if not all(isinstance(place, (torch.Tensor, int)) for place in places):
                return func(*args, **(kwargs or {}))
            as_tensor = lambda place: torch.tensor(place, device=args[0].device)  # noqa: E731
            return torch.ops.aten.index(args[0], [as_tensor(p) if isinstance(p, int) else p for p in places])

    def run(*args: Any) -> Any:
        with Indexing():
            return function(*args)

    return run


def refuse_recording() -> None:
    """Raise TraceError if make_fx, or a tracer built on it, is recording the operator that is being dispatched."""
    if recorder():
        raise TraceError(
            f"make_fx at {where(user_source())} records a function that spmd.jit traces already, and would take its "
            "tensors as constants. Call the function itself, or make the graph outside of spmd.jit."
        )
