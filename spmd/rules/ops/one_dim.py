"""Shapes and tensors of which one dim changes its length."""

from __future__ import annotations

from collections.abc import Sequence
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
