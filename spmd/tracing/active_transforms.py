"""The transforms of `torch.func` that act on tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_get_level,
)
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter


def active_transforms(tensors: Sequence[torch.Tensor]) -> list[TransformType]:
    """The transforms that act on one of the tensors, innermost first."""
    if not get_interpreter_stack():
        return []
    interpreter = retrieve_current_functorch_interpreter()
    wrapped = [tensor for tensor in tensors if maybe_get_level(tensor) == interpreter.level()]
    acts = any(_is_transformed(interpreter.key(), tensor) for tensor in wrapped)
    inner = [get_unwrapped(tensor) if maybe_get_level(tensor) == interpreter.level() else tensor for tensor in tensors]
    with interpreter.lower():
        return [interpreter.key()] * acts + active_transforms(inner)


_around: ContextVar[int] = ContextVar("spmd_transforms_around", default=0)


@contextlib.contextmanager
def called_by_transforms() -> Iterator[None]:
    """A context in which a user's function runs under the transforms that are there, of which it knows nothing."""
    token = _around.set(len(get_interpreter_stack() or ()))
    try:
        yield
    finally:
        _around.reset(token)


def acts_from_outside_only() -> bool:
    """Whether there are transforms, and all of them are around the user's function (`called_by_transforms`)."""
    return 0 < len(get_interpreter_stack() or ()) == _around.get()


def unwrapped(value: Any) -> Any:
    """The tensor below all transforms; any other value unchanged."""
    while isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def _is_transformed(transform: TransformType, tensor: torch.Tensor) -> bool:
    """Test whether the innermost transform acts on a tensor that it has wrapped."""
    if transform == TransformType.Grad:
        return tensor.requires_grad
    return transform != TransformType.Jvp or torch._VF._unpack_dual(tensor, level=0)[1] is not None  # type: ignore[attr-defined]
