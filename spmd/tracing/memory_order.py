"""Strides as permutations: tensors whose elements are next to each other in memory, as contiguous ones."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch._prims_common import make_contiguous_strides_for

Order: TypeAlias = tuple[int, ...]
"""The dims of a tensor, outermost in memory first."""


def memory_order(x: torch.Tensor) -> Order | None:
    """The dims of a tensor, outermost in memory first; None if its elements are not next to each other.

    >>> memory_order(torch.empty(2, 3, 4).movedim(2, 0)), memory_order(torch.empty(4)[::2])
    ((1, 2, 0), None)
    """
    if x.is_contiguous():
        return tuple(range(x.ndim))
    strides = x.stride()
    order = tuple(sorted(range(x.ndim), key=lambda dim: -strides[dim]))
    pairs = zip(order, make_contiguous_strides_for([x.shape[dim] for dim in order]), strict=True)
    return order if all(strides[dim] == stride for dim, stride in pairs if x.shape[dim] > 1) else None


def in_memory_order(x: torch.Tensor, order: Order) -> torch.Tensor:
    """A tensor with its dims in a memory order: contiguous, if that is its own."""
    return x if order == tuple(range(x.ndim)) else x.permute(order)


def of_memory_order(x: torch.Tensor, order: Order) -> torch.Tensor:
    """The tensor of which `in_memory_order` makes `x`."""
    return in_memory_order(x, tuple(map(order.index, range(x.ndim))))
