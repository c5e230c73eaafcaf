"""Memory layouts of a tensor: transposed, sliced, expanded, channels-last and overlapping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.core.value_types import is_continuous


@attrs.frozen(eq=False)
class MemoryLayout:
    """A memory layout that a tensor can have: a view of another, contiguous tensor.

    Args:
        name: for messages.
        hold: from a contiguous tensor to the contiguous tensor of which `view` takes a view.
        view: from the result of `hold` to a tensor of the original shape; made of torch operators, so it can be traced.
        is_expanded: whether elements share memory, so that their values are equal and not those of the original tensor.
    """

    name: str
    hold: Callable[[Tensor], Tensor]
    view: Callable[[Tensor], Tensor]
    is_expanded: bool = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor's values in this layout (for an expanded layout, some of them)."""
        return self.view(self.hold(tensor))


def layouts(tensor: Tensor) -> Iterator[MemoryLayout]:
    """The usual layouts that a tensor of this shape can have, except the contiguous one.

    >>> [layout.name for layout in layouts(torch.ones(3))]
    ['every other column', 'padded rows', 'offset', 'expanded along 0']
    """
    ndim, shape = tensor.ndim, tensor.shape
    if not tensor.numel():
        return
    if ndim >= 2:
        yield _ordered("dims reversed", range(ndim)[::-1])
    if ndim >= 1:
        yield _sliced("every other column", shape, -1, slice(0, None, 2), 2 * shape[-1])
    if ndim >= 3:
        yield _ordered("channels last", [0, *range(2, ndim), 1])
        yield _ordered("last dims swapped", [*range(ndim - 2), ndim - 1, ndim - 2])
        yield _ordered("first dims swapped", [1, 0, *range(2, ndim)])
    if ndim >= 2:
        yield _sliced("every other row", shape, 0, slice(0, None, 2), 2 * shape[0])
    if ndim >= 1:
        yield _sliced("padded rows", shape, -1, slice(1, shape[-1] + 1), shape[-1] + 3)
    count = tensor.numel()
    flat = _sliced("offset", (count,), 0, slice(1, count + 1), count + 3)
    yield MemoryLayout("offset", lambda x: flat.hold(x.reshape(-1)), lambda held: flat.view(held).view(shape))
    long = [dim for dim, size in enumerate(shape) if size > 1]
    yield from (_expanded(f"expanded along {dim}", shape, [dim]) for dim in long)
    if len(long) > 1:
        yield _expanded("expanded from one element", shape, long)


def rare_layouts(tensor: Tensor) -> Iterator[MemoryLayout]:
    """More layouts, for which some torch operators compute other values than for contiguous tensors.

    In the layout `windows`, made by `unfold`, elements share memory.

    >>> [layout(torch.arange(6).view(3, 2)).tolist() for layout in rare_layouts(torch.ones(3, 2))]
    [[[0, 2], [2, 4], [4, 5]]]
    """
    if tensor.ndim >= 4:
        yield _ordered("images transposed, channels last", [0, *range(1, tensor.ndim)[::-1]])
    if tensor.ndim >= 2 and tensor.shape[0] > 1 and tensor.shape[-1] > 1:
        rows, width = tensor.shape[0], tensor.shape[-1]
        last = slice(rows - 1, rows)
        hold = lambda x: torch.cat([x[..., 0], x[last, ..., 1:].movedim(-1, 0).flatten(0, 1)])  # noqa: E731
        yield MemoryLayout("windows", hold, lambda held: held.unfold(0, width, 1), is_expanded=True)


def _ordered(name: str, order: Sequence[int]) -> MemoryLayout:
    """The layout in which dims are stored in this order, major first."""
    back = [order.index(dim) for dim in range(len(order))]
    return MemoryLayout(name, lambda x: _contiguous(x.permute(tuple(order))), lambda held: held.permute(back))


def _sliced(name: str, shape: Sequence[int], dim: int, part: slice, size: int) -> MemoryLayout:
    """The layout of a slice of a larger tensor, whose other elements must not be read.

    The other elements are nan, so that reading one shows in the results. For integers, which may be positions, they are
    the largest of the values: a kernel that reads one has wrong results, but does not write out of bounds.
    """
    sizes = list(shape)
    sizes[dim] = size
    index: list[Any] = [slice(None)] * len(shape)
    index[dim] = part

    def hold(x: Tensor) -> Tensor:
        held = _contiguous((x.new_full((), float("nan")) if is_continuous(x.dtype) else x.amax()).expand(sizes))
        held[tuple(index)].copy_(x)
        return held

    return MemoryLayout(name, hold, lambda held: held[tuple(index)])


def _expanded(name: str, shape: Sequence[int], dims: Sequence[int]) -> MemoryLayout:
    first = tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(len(shape)))
    return MemoryLayout(name, lambda x: _contiguous(x[first]), lambda held: held.expand(tuple(shape)), is_expanded=True)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
