"""`as_strided` as a gather, and a write through it as a scatter: where strides are known, elements have numbers.

Strides are no part of a program, so what an operator reads by them is found while tracing: every element of a storage
has a place in the tensors that share it.
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
    """Which elements of a tensor lie where a strided view reads.

    Args:
        like: a tensor, of which only size, strides and storage offset matter.
        size, stride, offset: of the view of its storage; the offset is by default that of `like`.

    Returns:
        For every element of the view, in order, its number in `like.flatten()`, i64[numel]; None if the view reaches
        elements of the storage that `like` does not hold.

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
    """Whether places name all elements of a flat tensor in their order."""
    with _plain():
        return torch.equal(found, torch.arange(flat.numel()))


def overlaps(x: torch.Tensor) -> bool:
    """Whether several elements of a tensor share one place in memory."""
    with _plain():
        held = _positions(x.shape, x.stride(), 0)
        return len(held.unique()) < len(held)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """A context in which tensors are real ones: no mode of a trace sees what is done with them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _positions(size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """Where the elements of a strided tensor lie in its storage, i64[numel]."""
    found = torch.full((1,), offset)
    for length, step in zip(size, stride, strict=True):
        found = (found[:, None] + torch.arange(length) * step).flatten()
    return found
