"""The indices of `as_strided` as a gather, and of a write through it as a scatter.

A program has no strides. Tracing knows the strides of each tensor, and so finds which elements of a tensor a strided
view of its storage reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

GATHERS = frozenset({aten.as_strided.default, aten.as_strided_copy.default})
SCATTERS = frozenset({aten.as_strided_scatter.default})


def places(like: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> torch.Tensor | None:
    """The flat indices in a tensor of the elements of a strided view of its storage.

    Args:
        like: a tensor, of which only size, strides and storage offset matter.
        size, stride, offset: the arguments of `as_strided`; if None, the offset is that of `like`.

    Returns:
        For each element of the view, in order, its index in `like.flatten()`, i64[numel]; None if the view reaches
        elements of the storage that are not elements of `like`.

    >>> places(torch.empty(2, 3).t(), (4,), (1,), 1)
    tensor([2, 4, 1, 3])
    """
    with _plain():
        wanted = _positions(size, stride, int(like.storage_offset()) if offset is None else offset)
        held = _positions(like.shape, like.stride(), int(like.storage_offset()))
        if not wanted.numel():
            return wanted
        if not held.numel():
            return None
        numbers = torch.full((int(max(wanted.max(), held.max())) + 1,), -1)
        numbers[held] = torch.arange(len(held))
        found = numbers[wanted]
        return found if bool((found >= 0).all()) else None


def in_order(found: torch.Tensor, flat: torch.Tensor) -> bool:
    """Whether the indices `found` select all elements of a flat tensor in order."""
    with _plain():
        return torch.equal(found, torch.arange(flat.numel()))


def on_device(found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The indices `found` on the device of a tensor."""
    with _plain():
        return found.to(like.device)


def overlaps(x: torch.Tensor) -> bool:
    """Whether several elements of a tensor share memory."""
    with _plain():
        held = _positions(x.shape, x.stride(), 0)
        return len(held.unique()) < len(held)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """A context in which tensors are real: the modes of a trace do not see operators on them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _positions(size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """The storage positions of the elements of a strided tensor, in order, i64[numel]."""
    found = torch.full((1,), offset)
    for length, step in zip(size, stride, strict=True):
        found = (found[:, None] + torch.arange(length) * step).flatten()
    return found
