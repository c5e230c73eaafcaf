"""Tensors without the rest of what they are views of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch


def own_storage(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors that hold no more memory than their own together: views of parts of larger ones are copied.

    >>> whole = torch.arange(4)
    >>> [tensor.untyped_storage().nbytes() for tensor in own_storage(whole[:2])]
    [16]
    >>> [tensor.untyped_storage().nbytes() for tensor in own_storage(whole[:2], whole[2:])]
    [32, 32]
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    viewed: Counter[int] = Counter()
    for tensor, storage in zip(tensors, storages, strict=True):
        viewed[storage._cdata] += tensor.nbytes
    return tuple(
        tensor.clone() if storage.nbytes() > viewed[storage._cdata] else tensor
        for tensor, storage in zip(tensors, storages, strict=True)
    )


def own_memory(*tensors: torch.Tensor) -> Any:
    """As `own_storage`, for a rank's program: one tensor, or a tuple of several."""
    found = own_storage(*tensors)
    return found if len(found) > 1 else found[0]
