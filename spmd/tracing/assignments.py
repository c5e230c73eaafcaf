"""`x[mask] = value` as `torch.where` or `masked_fill_`.

As a write to the indices where the mask is true, it would not work under vmap, and the gradient of the value would have
a shape that depends on the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def fill_masked(x: torch.Tensor, index: Any, value: Any) -> bool:
    """Do `x[index] = value` if `index` is one mask with slices and integers beside it, and `value` is one number.

    Args:
        x: the tensor that is written to.
        index: anything that can index a tensor.
        value: a number or a tensor.

    Returns:
        Whether the assignment was done; if not, `x` is unchanged.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    places = [place for place, item in enumerate(items) if isinstance(item, torch.Tensor)]
    if len(places) != 1 or not _is_one_number(x, value):
        return False
    (place,) = places
    mask = items[place]
    others = items[:place] + items[place + 1 :]
    if mask.dtype is not torch.bool or not all(map(_is_basic, others)):
        return False
    view = x[tuple(items[:place] + [slice(None)] * mask.ndim + items[place + 1 :])]
    behind = sum(isinstance(item, slice) for item in items[place + 1 :])
    if Ellipsis not in items[:place]:
        behind = view.ndim - mask.ndim - sum(isinstance(item, slice) for item in items[:place])
    if mask.shape != view.shape[view.ndim - behind - mask.ndim : view.ndim - behind]:
        return False
    mask = mask.reshape((*mask.shape, *[1] * behind))
    if 0 in view.stride():  # elements share memory: see spmd.tracing.overlapping
        view.masked_fill_(mask, value)
    else:
        number = value.reshape(()) if isinstance(value, torch.Tensor) else x.new_full((), value)
        view.copy_(torch.where(mask, number, view))
    return True


def check_masks(x: torch.Tensor, index: Sequence[torch.Tensor | None]) -> None:
    """Check the shapes of the masks in an index; torch's meta kernel of `index_put` does not.

    Raises:
        IndexError: a mask does not have the shape of the dims that it indexes; torch's error.
    """
    dim = 0
    for position, item in enumerate(index):
        is_mask = item is not None and item.dtype in (torch.bool, torch.uint8)
        dims = item.ndim if item is not None and is_mask else 1
        if item is not None and is_mask and item.shape != x.shape[dim : dim + dims]:
            raise IndexError(
                f"The shape of the mask {list(item.shape)} at index {position} does not match the shape of the indexed "
                f"tensor {list(x.shape)} at index {dim}"
            )
        dim += dims


def _is_one_number(x: torch.Tensor, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype is x.dtype and value.ndim <= 1
    return isinstance(value, (bool, int, float))


def _is_basic(item: Any) -> bool:
    return (isinstance(item, (slice, int)) and not isinstance(item, bool)) or item is Ellipsis
