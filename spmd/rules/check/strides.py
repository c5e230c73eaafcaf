"""The same values in other memory: transposed, sliced, expanded and channels-last, written in torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Restride = Callable[[Tensor], Tensor]


def layouts(tensor: Tensor) -> Iterator[tuple[str, Restride]]:
    """The layouts that a tensor's shape can have other than the contiguous one, by name.

    The functions take a contiguous tensor and give one of equal values; those named `expanded` give one that is
    constant along a dim. They can be traced.
    """
    ndim, shape = tensor.ndim, tensor.shape
    if not tensor.numel():
        return
    yield "offset", _offset
    if ndim >= 1:
        yield "every other column", lambda x: _every_other(x, ndim - 1)
        yield "padded rows", _padded
    if ndim >= 2:
        yield "every other row", lambda x: _every_other(x, 0)
        yield "dims reversed", lambda x: _in_order(x, list(reversed(range(ndim))))
    if ndim >= 3:
        yield "last dims swapped", lambda x: _in_order(x, [*range(ndim - 2), ndim - 1, ndim - 2])
        yield "first dims swapped", lambda x: _in_order(x, [1, 0, *range(2, ndim)])
        yield "channels last", lambda x: _in_order(x, [0, *range(2, ndim), 1])
    long = [dim for dim, size in enumerate(shape) if size > 1]
    for dim in long:
        yield f"expanded along {dim}", lambda x, dim=dim: x.narrow(dim, 0, 1).expand(x.shape)  # type: ignore[misc]
    if len(long) > 1:
        yield "expanded from one element", lambda x: x[(slice(0, 1),) * x.ndim].expand(x.shape)


def is_expanded(layout: str) -> bool:
    """Whether a layout is one of those that change values."""
    return layout.startswith("expanded")


def _in_order(x: Tensor, order: list[int]) -> Tensor:
    """With memory in another order of dims, major first."""
    return (
        x.permute(order).clone(memory_format=torch.contiguous_format).permute([order.index(d) for d in range(x.ndim)])
    )


def _every_other(x: Tensor, dim: int) -> Tensor:
    sizes = list(x.shape)
    sizes[dim] *= 2
    index = [slice(None)] * x.ndim
    index[dim] = slice(0, None, 2)
    return _part(x, sizes, tuple(index))


def _padded(x: Tensor) -> Tensor:
    size = x.shape[-1]
    return _part(x, [*x.shape[:-1], size + 3], (..., slice(1, size + 1)))


def _offset(x: Tensor) -> Tensor:
    return _part(x.reshape(-1), [x.numel() + 3], (slice(1, x.numel() + 1),)).view(x.shape)


def _part(x: Tensor, sizes: list[int], index: object) -> Tensor:
    """`x` in a part of a larger tensor; what is around it must not be read.

    Around numbers that may be positions is the largest of them: a kernel that takes it for one is wrong, and does not
    write outside of its memory.
    """
    floating = x.dtype.is_floating_point or x.dtype.is_complex
    around = x.new_full((), float("nan")) if floating else x.amax()
    part = around.expand(sizes).clone(memory_format=torch.contiguous_format)[index]  # type: ignore[index]
    part.copy_(x)
    return part
