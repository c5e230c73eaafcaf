"""What transforms in a traced function take and return: a tensor from around it becomes one of the trace first.

Torch wraps operands, and unwraps results, without a call that a trace sees. What it has wrapped can no longer be
exchanged: the derivative is with respect to the wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap

from spmd.tracing.closures import ClosureLifting
from spmd.tracing.running import is_tracing, running_trace


def _of_the_trace(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that wraps or unwraps its first argument: a tensor, or that of the trace for it."""

    @functools.wraps(wrap)
    def wrapped(tensor: torch.Tensor, *args: Any) -> Any:
        trace = running_trace() if is_tracing() and isinstance(tensor, torch.Tensor) else None
        return wrap(trace.take(tensor) if isinstance(trace, ClosureLifting) else tensor, *args)

    return wrapped


# Once, and not in each trace: other threads may call transforms meanwhile.
for _module, *_names in (
    (eager_transforms, "_wrap_for_grad", "_unwrap_for_grad"),
    (vmap, "_add_batch_dim", "_remove_batch_dim"),
):
    for _name in _names:
        setattr(_module, _name, _of_the_trace(getattr(_module, _name)))
