"""Torch's own tracers inside a trace, which would record the trace's tensors as constants.

A function under torch.compile runs eagerly. torch.func.linearize, which records the derivative by make_fx, evaluates it
by forward mode instead, at each call of the function that it returns. Other tracers raise a TraceError.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._functorch import eager_transforms

from spmd.errors import TraceError
from spmd.tracing.linearize import evaluated_anew, recorder
from spmd.tracing.recorder import where
from spmd.tracing.source import user_source


@contextlib.contextmanager
def nested_tracers() -> Iterator[None]:
    """A context manager in which this thread can use torch.compile and torch.func.linearize inside a trace."""
    owner, before = threading.get_ident(), eager_transforms.lazy_dynamo_disallow

    def choose(step: Any) -> Any:
        """Replace each of the two steps of `linearize`: recording the derivative, and folding its constants."""
        return before(step) if threading.get_ident() != owner else _LINEARIZE.get(step, step)

    eager_transforms.lazy_dynamo_disallow = choose  # type: ignore[assignment]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        eager_transforms.lazy_dynamo_disallow = before


_LINEARIZE: Mapping[Any, Callable[..., Any]] = {
    eager_transforms.make_fx: evaluated_anew,
    eager_transforms.const_fold.split_const_subgraphs: lambda evaluate: evaluate,
}


def refuse_subgraph(operator: torch._ops.HigherOrderOperator) -> None:
    """Raise TraceError for a higher-order operator other than that of `torch.autograd.Function` under torch.func."""
    if operator is not torch._functorch.autograd_function.custom_function_call:
        raise TraceError(
            f"torch.ops.higher_order.{operator.name()} at {where(user_source())} takes functions, which a program of "
            "operators cannot hold. Write torch.where for torch.cond, a Python loop of fixed length for while_loop, "
            "scan and map, and scaled_dot_product_attention for flex_attention."
        )


def refuse_recording() -> None:
    """Raise TraceError if make_fx, or a tracer built on it, is recording the operator that is being dispatched."""
    if recorder():
        raise TraceError(
            f"make_fx at {where(user_source())} records a function that spmd.jit traces already, and would take its "
            "tensors as constants. Call the function itself, or make the graph outside of spmd.jit."
        )
