"""Moves of a value between specs, shards and plain tensors: linear maps, whose transposes give gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(move: Any, transpose: Any, *values: torch.Tensor) -> Any:
        return move(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.move, ctx.transpose = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        found = ctx.transpose(*cotangents)
        return None, None, *(found if isinstance(found, tuple) else (found,))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.move(*tangents)
