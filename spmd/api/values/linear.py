"""Moves of a value between specs, shards and plain tensors: linear maps, whose transposes give gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from spmd.errors import ShardingError
from spmd.job.torch_compile import never_compiled

_any_requires_grad = torch._C._any_requires_grad  # type: ignore[attr-defined]


def linear(move: Callable[..., Any], transpose: Callable[..., Any], *values: torch.Tensor) -> Any:
    """`move(*values)`, recorded by autograd if a value requires a gradient.

    Args:
        move: a linear map, which returns a new tensor or a tuple of them.
        transpose: from the cotangents of the results to those of the values; autograd records what it does.
        values: its arguments.
    """
    if torch.is_grad_enabled() and _any_requires_grad(*values):
        return _Linear.apply(move, transpose, *values)  # type: ignore[no-untyped-call]
    return move(*values)


def is_computed(value: Any) -> bool:
    """Test for a plain tensor that autograd has computed, which is no leaf."""
    return _is_plain(value) and value.grad_fn is not None and torch.is_grad_enabled()


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor")  # which DTensors have


def gradients_of(values: Sequence[Any], names: Sequence[str]) -> str:
    """The part of a call's name that says which of its tensors get a gradient, for ranks to compare.

    Raises:
        ShardingError: a tensor that a transform of `torch.func` acts on, or one with a tangent.
    """
    for value, name in zip(values, names, strict=True):
        if _is_transformed(value):
            raise ShardingError(
                f"{name} is a tensor that torch.func or forward-mode AD acts on; its derivative would be lost in "
                "shards. Distribute what the transform is of: torch.func.grad(f)(spmd.distribute(x, spec, mesh)), or "
                "make f a jitted function."
            )
    found = [name for value, name in zip(values, names, strict=True) if is_computed(value)]
    return f" with the gradient of {', '.join(found)}" if found else ""


def refuse_gradients(values: Sequence[Any], names: Sequence[str]) -> None:
    """ShardingError if autograd has computed one of the plain tensors that one rank sends to the others."""
    for value, name in zip(values, names, strict=True):
        if is_computed(value):
            raise ShardingError(
                f"{name} was computed by autograd, and with src_rank no gradient would come back to it. Pass "
                f"{name.partition(' ')[2] or 'it'}.detach(), or leave out src_rank where every rank has the tensor."
            )


def _is_transformed(value: Any) -> bool:
    """Test for a plain tensor inside a transform of `torch.func`."""
    if not _is_plain(value):
        return False
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        return True
    while is_functorch_wrapped_tensor(value):
        if value.requires_grad or is_batchedtensor(value):
            return True
        value = get_unwrapped(value)
    return False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(move: Any, transpose: Any, *values: torch.Tensor) -> Any:
        return move(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.move, ctx.transpose = inputs[:2]
        ctx.set_materialize_grads(isinstance(output, tuple) or len(inputs) > 3)  # a plain tensor, also for a DTensor

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        if cotangents == (None,):
            return (None,) * len(ctx.needs_input_grad)
        found = ctx.transpose(*cotangents)
        return None, None, *(found if isinstance(found, tuple) else (found,))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.move(*tangents)
