"""Tensors without the rest of what they are views of."""

from __future__ import annotations

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
    viewed: dict[int, int] = {}
    storages = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        number = storage._cdata
        viewed[number] = viewed.get(number, 0) + tensor.nbytes
        storages.append((number, storage))  # held: numbers of storages that are gone are used again
    parts = {number for number, storage in dict(storages).items() if storage.nbytes() > viewed[number]}
    if not parts:
        return tensors
    return tuple(t.clone() if number in parts else t for t, (number, _) in zip(tensors, storages, strict=True))


def own_memory(*tensors: torch.Tensor) -> Any:
    """Give results of a rank's program storages of their own."""
    found = own_storage(*tensors)
    return found if len(found) > 1 else found[0]
