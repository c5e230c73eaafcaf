"""Whether nothing but the running program holds the memory of a tensor, so that it can be written to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_
from sys import getrefcount

import torch

Tensors = list[torch.Tensor]

LISTED = next(map(getrefcount, [object()]))
"""The references that `getrefcount` finds of an object that only a list holds."""

_address, _uses = torch.Tensor.data_ptr, torch.Tensor._use_count  # type: ignore[attr-defined]
_target = weakref.ref.__call__
_storage_uses = torch._C._storage_Use_Count  # type: ignore[attr-defined]

_SEEN = 64
"""Of how many ranks the tensors are remembered."""

_STORAGE_USES = 2
"""Of the memory of one tensor: the tensor's, and that of the storage as an object of Python."""


def have_references(tensors: Sequence[torch.Tensor], count: int) -> bool:
    """Whether Python has so many references to each tensor, and C++ none but that of its object in Python."""
    return {*map(getrefcount, tensors)} == {count} and {*map(_uses, tensors)} == {1}


def is_owned(tensors: Tensors) -> list[bool]:
    """For each tensor, whether only one variable and the list hold it, and it is contiguous and alone in its memory."""
    return [_is_held_once(count, tensor) for count, tensor in zip(map(getrefcount, tensors), tensors, strict=True)]


def _is_held_once(count: int, tensor: torch.Tensor) -> bool:
    if count != LISTED + 1 or _uses(tensor) != 1:
        return False
    memory = tensor.untyped_storage()
    return (
        _storage_uses(memory._cdata) == _STORAGE_USES
        and memory.nbytes() == tensor.nbytes
        and tensor.is_contiguous()
        and memory.resizable()  # else it is not torch's, but numpy's, for one
        and (not memory.is_shared() or tensor.is_cuda)  # with other processes; for CUDA, torch always says so
    )


class Owned:
    """As `is_owned`, faster for tensors of an earlier call: of these, only who holds them is looked at.

    A training step finds its parameters where it has left them; on virtual ranks, each rank its own.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}  # by the id of the first tensor

    def __call__(self, tensors: Tensors) -> list[bool]:
        """For each tensor, whether it is owned."""
        if not tensors:
            return []
        seen = self._seen.get(id(tensors[0]))
        if seen is not None and seen.are(tensors):
            return [True] * len(tensors) if seen.are_alone(tensors) else is_owned(tensors)
        found = is_owned(tensors)
        if all(found):
            if len(self._seen) >= _SEEN:
                self._seen.clear()
            self._seen[id(tensors[0])] = _Seen(tensors)
        return found


class _Seen:
    """Tensors that were owned. They may be gone, or have other memory, where this must not be looked at."""

    __slots__ = ("_addresses", "_storages", "_tensors")

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = list(map(weakref.ref, tensors))
        self._addresses = list(map(_address, tensors))
        self._storages = [tensor.untyped_storage()._cdata for tensor in tensors]

    def are(self, tensors: Tensors) -> bool:
        """Whether these are the tensors, and their memory is the same."""
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, map(_target, self._tensors), tensors))
            and list(map(_address, tensors)) == self._addresses
        )

    def are_alone(self, tensors: Tensors) -> bool:
        """Whether only one variable and the list hold each, and nothing else its memory; they must be the tensors."""
        alone = {*map(_storage_uses, self._storages)} == {_STORAGE_USES}
        return alone and have_references(tensors, LISTED + 1)
