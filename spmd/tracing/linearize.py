"""torch.func.linearize without a recording: its linear function evaluates the derivative anew, by forward mode.

Torch records the derivative by make_fx, which would take tensors of a trace, and shards of DTensors, as constants.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from spmd.errors import TraceError
from spmd.ir.random_operators import is_random
from spmd.tracing.source import user_source, where

_C: Any = torch._C

recorder: Callable[[], Any] = functools.partial(_C._get_dispatch_mode, _C._TorchDispatchModeKey.PROXY)
"""The mode of make_fx, or of a tracer built on it, if one is recording; else None."""


class _Draws(TorchDispatchMode):
    """Notices random operators of this thread.

    Attributes:
        is_any: whether there were any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_any = self.is_any or is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class RecordingError(TraceError):
    """A call that make_fx cannot record."""


def evaluated_anew(derivative: Callable[[tuple[torch.Tensor, ...]], Any]) -> Callable[..., Any]:
    """Replaces `make_fx(derivative)` in `linearize`: a function of tangents that returns `evaluate`.

    `evaluate` maps flat tangents to flat results. It calls `torch.func.jvp` on the function and primals that
    `derivative` closes over, because vmap does not support the forward-mode level that `derivative` enters.
    """
    closed_over = inspect.getclosurevars(derivative).nonlocals
    function, structure = closed_over["func"], closed_over["primals_argspec"]
    primals = tree_unflatten(closed_over["flat_primals"], structure)

    def evaluate(*tangents: torch.Tensor) -> list[Any]:
        with _Draws() as draws:
            results, _ = tree_flatten(torch.func.jvp(function, primals, tree_unflatten(tangents, structure))[1])
        if draws.is_any:
            raise TraceError(
                f"torch.func.linearize at {where(user_source())} of a function that draws random numbers: each call of "
                "the linear function would draw others. Use torch.func.jvp, or draw outside of the function and pass "
                "the numbers in."
            )
        return results

    return lambda tangents: evaluate
