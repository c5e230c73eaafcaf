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
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch._functorch import eager_transforms

from spmd.errors import TraceError
from spmd.job.user_code import is_user_file
from spmd.tracing.linearize import evaluated_anew, recorder
from spmd.tracing.recorder import where
from spmd.tracing.source import user_source

_logger = logging.getLogger("spmd")


@contextlib.contextmanager
def nested_tracers() -> Iterator[None]:
    """A context manager in which this thread can use torch.compile and torch.func.linearize inside a trace."""
    from torch._dynamo import eval_frame  # as torch.compiler.set_stance does; it takes a second

    owner, before = threading.get_ident(), eager_transforms.lazy_dynamo_disallow

    def choose(step: Any) -> Any:
        """Replace each of the two steps of `linearize`: recording the derivative, and folding its constants."""
        return before(step) if threading.get_ident() != owner else _LINEARIZE.get(step, step)

    compiling, stance = torch.compiler._is_compiling_flag, eval_frame._callback_from_stance

    def callback(compiler: Any) -> Any:
        """Say that a function under torch.compile is inlined."""
        if threading.get_ident() == owner and compiler not in (None, False) and not _is_of_torch():
            _say_inlined(where(user_source()))
        return stance(compiler)

    eager_transforms.lazy_dynamo_disallow = choose  # type: ignore[assignment]
    torch.compiler._is_compiling_flag = True
    eval_frame._callback_from_stance = callback  # type: ignore[assignment]
    try:
        with torch.compiler.set_stance("force_eager"), _flex_attention_with_gradients():
            yield
    finally:
        eager_transforms.lazy_dynamo_disallow = before
        torch.compiler._is_compiling_flag = compiling
        eval_frame._callback_from_stance = stance


@contextlib.contextmanager
def _flex_attention_with_gradients() -> Iterator[None]:
    """A context in which this thread can differentiate flex_attention on any device: see `inlined`.

    Torch's kernels have no backward pass on the CPU, so that it refuses operands which require grad there.
    """
    module: Any = sys.modules.get(_FLEX_ATTENTION)
    if not hasattr(module, "_validate_device"):
        yield
        return
    owner, before = threading.get_ident(), module._validate_device

    def validate(*operands: Any) -> None:
        if threading.get_ident() != owner:
            before(*operands)

    module._validate_device = validate
    try:
        yield
    finally:
        module._validate_device = before


_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


def _is_of_torch() -> bool:
    """Whether torch itself compiles: for flex_attention, and for torch.cond and the like, which are errors."""
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


_LINEARIZE: Mapping[Any, Callable[..., Any]] = {
    eager_transforms.make_fx: evaluated_anew,
    eager_transforms.const_fold.split_const_subgraphs: lambda evaluate: evaluate,
}


def inlined(operator: torch._ops.HigherOrderOperator) -> Callable[..., Any]:
    """What is called in place of a higher-order operator in a trace.

    `flex_attention` is its definition by operators. That of `torch.autograd.Function` under torch.func is itself.

    Raises:
        TraceError: any other one.
    """
    if operator is torch._functorch.autograd_function.custom_function_call:
        return operator
    if operator.name() == "flex_attention":
        return _attention
    raise TraceError(
        f"torch.ops.higher_order.{operator.name()} at {where(user_source())} takes functions, which a program of "
        "operators cannot hold. Write torch.where for torch.cond, a Python loop of fixed length for while_loop, scan "
        "and map, and spmd.debug.print for print."
    )


def _attention(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention` by operators; what scores read of tensors is differentiable under the vmap that is in it."""
    from torch._dynamo import _trace_wrapped_higher_order_op as indexing
    from torch._higher_order_ops.flex_attention import math_attention

    before, indexing.mod_index = indexing.mod_index, torch.ops.aten.index
    try:
        return math_attention(*args, **kwargs)
    finally:
        indexing.mod_index = before


def refuse_recording() -> None:
    """Raise TraceError if make_fx, or a tracer built on it, is recording the operator that is being dispatched."""
    if recorder():
        raise TraceError(
            f"make_fx at {where(user_source())} records a function that spmd.jit traces already, and would take its "
            "tensors as constants. Call the function itself, or make the graph outside of spmd.jit."
        )
