"""Predicates of branches and loops: boolean scalars, which the host reads where they have values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.tracing.active_transforms import unwrapped
from spmd.tracing.linearize import RecordingError, recorder
from spmd.tracing.source import where


def boolean_scalar(value: Any, call: str, name: str, *, numbers: bool = False) -> bool | Tensor:
    """A predicate as a bool or a 0-d boolean tensor.

    Args:
        value: what the user gives, or a function of the user's returns.
        call: the function that the user calls, for messages: `spmd.cond`.
        name: what the value is.
        numbers: whether a number is a predicate too, true if it is not zero.

    Raises:
        TraceError: it is none.
    """
    if isinstance(value, (bool, torch.SymBool)) or (numbers and isinstance(value, (int, float, torch.SymFloat))):
        return bool(value)
    dtype_fits = isinstance(value, Tensor) and (value.dtype is torch.bool or (numbers and not value.dtype.is_complex))
    if not dtype_fits or value.ndim:
        got = TensorMeta.of(value) if isinstance(value, Tensor) else f"{type(value).__name__} {value!r:.60}"
        remedy = "x.all() or x.any() makes one of many." if getattr(value, "ndim", 0) else "Compare, as in x > 0."
        raise TraceError(f"{call} at {where()}: {name} must be a boolean scalar (got {got}). {remedy}")
    return value if value.dtype is torch.bool else value != 0


def is_batched(predicate: bool | Tensor) -> bool:
    """Whether a predicate is one for each example of a vmap."""
    while isinstance(predicate, Tensor) and is_functorch_wrapped_tensor(predicate):
        if is_batchedtensor(predicate):
            return True
        predicate = get_unwrapped(predicate)
    return False


def read(predicate: bool | Tensor, call: str) -> bool:
    """The value of a predicate, or whether it is true for an example of a vmap.

    Raises:
        TraceError: it has no value.
    """
    if isinstance(predicate, bool):
        return predicate
    value: Tensor = unwrapped(predicate)
    if value.is_meta:
        raise TraceError(f"{call} at {where()} decides by a tensor on the meta device, which has no value.")
    if recorder() is not None:
        raise RecordingError(f"{call} at {where()} decides by a tensor that make_fx records, which has no value.")
    with temporarily_clear_interpreter_stack():
        return bool(value.any().item() if value.ndim else value.item())
