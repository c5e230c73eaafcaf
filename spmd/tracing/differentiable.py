"""Replacements for torch functions that lack derivatives, or have costly ones, or choose other kernels in a trace.

Later random numbers depend on the strides of results, so these must be those of the kernels of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import TransformType
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmd.tracing.active_transforms import active_transforms, acts_from_outside_only
from spmd.tracing.draw_scopes import draw_scope
from spmd.tracing.products import cumprod, prod


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot`; torch's reads the values of its argument under grad and jvp."""
    if num_classes < 0:
        return F.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    if not active_transforms([tensor]):  # a lookup refuses classes that do not exist; torch under vmap does not
        tensor = classes.expand(*tensor.shape[:-1], num_classes).gather(-1, tensor)
    return (tensor.unsqueeze(-1) == classes).long().contiguous()


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention by fused kernels, unless a transform acts on the operands that these kernels do not support.

    They have no forward mode, no second derivative and no vmap rule. Elsewhere they are what torch calls: later random
    numbers depend on the strides of their results.
    """
    operands = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
    fused = active_transforms(operands) in ([], [TransformType.Grad])
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def _max_pool1d(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`F.max_pool1d`; where no gradient is taken, torch has a kernel of its own, whose results are contiguous."""
    result = F.max_pool1d(x, *args, **kwargs)
    return result if isinstance(result, tuple) or active_transforms([x]) else result.contiguous()


def _pad(x: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> torch.Tensor:
    """`F.pad`; a circular pad as a `cat` of slices, where torch writes into slices of a new tensor."""
    sides = list(zip(range(x.ndim - 1, -1, -1), pad[::2], pad[1::2], strict=False))
    cropped = [x.shape[dim] + min(before, 0) + min(after, 0) for dim, before, after in sides]
    fits = all(max(side[1:]) <= size and size > 0 for side, size in zip(sides, cropped, strict=True))
    if mode != "circular" or not fits or len(pad) % 2 or x.ndim - len(sides) not in (1, 2):
        return F.pad(x, pad, mode, value)
    for (dim, before, after), size in zip(sides, cropped, strict=True):
        x = x.narrow(dim, max(-before, 0), size)
        pieces = [x.narrow(dim, size - max(before, 0), max(before, 0)), x, x.narrow(dim, 0, max(after, 0))]
        pieces = [piece for piece in pieces if piece.shape[dim]]
        x = torch.cat(pieces, dim) if len(pieces) > 1 else x
    return x.clone(memory_format=torch.contiguous_format)


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """`F.dropout`; under a transform torch draws in the order of dims, and else in that of strides.

    Under one that only we see, it draws what it does without.
    """
    if not (training and 0.0 < p < 1.0 and x.numel() and acts_from_outside_only()) or draw_scope() is not None:
        return F.dropout(x, p, training, inplace)
    noise = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    return x.mul_(noise) if inplace else x * noise


def _trace(input: torch.Tensor) -> torch.Tensor:
    """`torch.trace`, whose gradient is written to a diagonal; torch's own is made of the indices of a whole matrix."""
    return input.diagonal().sum() if input.ndim == 2 and input.dtype != torch.bool else torch.trace(input)


def _resize_as(x: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`x.resize_as_(other)`, which does nothing if the shapes are equal; in a trace it would change strides."""
    return x if x.shape == other.shape and not kwargs else x.resize_as_(other, **kwargs)


DIFFERENTIABLE: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        F.one_hot: _one_hot,
        F.scaled_dot_product_attention: _attention,
        F.dropout: _dropout,
        torch.dropout: _dropout,
        F.max_pool1d: _max_pool1d,
        F.pad: _pad,
        torch.prod: prod,
        torch.Tensor.prod: prod,
        torch.cumprod: cumprod,
        torch.Tensor.cumprod: cumprod,
        torch.trace: _trace,
        torch.Tensor.trace: _trace,
        torch.Tensor.resize_as_: _resize_as,
        torch.resize_as_: _resize_as,
    }
)
"""The replacement for each torch function."""
