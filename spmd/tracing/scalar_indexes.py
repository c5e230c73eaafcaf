"""Items of tensors at places that scalars of the trace say, as `x[i]` in a loop: torch would read their values."""

from __future__ import annotations

from typing import Any

import torch

from spmd.tracing.traced_tensor import is_traced, known_value


def item_at_scalars(x: torch.Tensor, index: Any) -> Any:
    """`x[index]`; NotImplemented where torch needs no value, or takes elements by tensors that are no scalars."""
    found = _selection(x, index)
    return NotImplemented if found is None else torch.ops.aten.index.Tensor(*found)


def assign_at_scalars(x: torch.Tensor, index: Any, value: Any) -> Any:
    """`x[index] = value`; NotImplemented as of `item_at_scalars`."""
    found = _selection(x, index)
    if found is None:
        return NotImplemented
    view, places = found
    value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=view.dtype, device=view.device)
    torch.ops.aten.index_put_.default(view, places, value.to(view.dtype))
    return None


def _selection(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]] | None:
    """A view of a tensor by all that is no tensor, and the scalars at their dims of it; None if there are none."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(item, torch.Tensor) and _is_unknown_scalar(item) for item in items):
        return None
    if not all(map(_takes_at_most_one_dim, items)):
        return None
    used = sum(item is not None and item is not Ellipsis for item in items)
    places: list[torch.Tensor | None] = []
    for item in items:
        if item is Ellipsis:
            places += [None] * (x.ndim - used)
        elif isinstance(item, torch.Tensor):
            places.append(item)
        elif not isinstance(item, int):
            places.append(None)
    return x[tuple(slice(None) if isinstance(item, torch.Tensor) else item for item in items)], places


def _is_unknown_scalar(item: torch.Tensor) -> bool:
    is_integer = item.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    return is_integer and not item.ndim and is_traced(item) and known_value(item) is None


def _takes_at_most_one_dim(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return not item.ndim and item.dtype is not torch.bool
    return isinstance(item, (int, slice, type(None), type(Ellipsis))) and not isinstance(item, bool)
