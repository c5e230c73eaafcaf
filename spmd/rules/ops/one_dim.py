"""Shapes and tensors of which some dims change their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def resized(shape: Sequence[int], dim: int, length: int) -> list[int]:
    """The shape with another length in `dim`, which is not negative.

    >>> resized((2, 3, 4), 1, 7)
    [2, 7, 4]
    """
    return [length if i == dim else size for i, size in enumerate(shape)]


def padded(x: Tensor, dim: int, before: int, after: int, fill: Any = 0) -> Tensor:
    """`x` with rows of one value before and after those in `dim`, which is not negative; `x` itself if there are none.

    >>> padded(torch.tensor([[1, 2]]), 1, 1, 2)
    tensor([[0, 1, 2, 0, 0]])
    """
    if not (before or after):
        return x
    pads = [*(0,) * (2 * (x.ndim - 1 - dim)), before, after]
    return torch.ops.aten.constant_pad_nd.default(x, pads, fill)  # type: ignore[no-any-return]


def not_empty(x: Tensor, lengths: Mapping[int, int]) -> Tensor:
    """`x` with those of the dims that are empty padded by zeros to the lengths: torch's kernels reject empty dims.

    >>> not_empty(torch.ones(0, 2), {0: 1, 1: 3})
    tensor([[0., 0.]])
    """
    added = [0 if size else lengths.get(dim, 0) for dim, size in enumerate(x.shape)]
    pads = [pad for count in reversed(added) for pad in (0, count)]
    return torch.ops.aten.constant_pad_nd.default(x, pads) if any(added) else x


def cropped(x: Tensor, lengths: Mapping[int, int]) -> Tensor:
    """The first rows of `x` in each of the dims.

    >>> cropped(torch.arange(6).reshape(2, 3), {1: 2})
    tensor([[0, 1],
            [3, 4]])
    """
    for dim, length in lengths.items():
        x = x if x.shape[dim] == length else x.narrow(dim, 0, length)
    return x
