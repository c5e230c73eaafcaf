"""`as_strided` as a chain of views, else as a gather, and a write through it as the reverse.

A program has no strides. Tracing knows the strides of each tensor, and so finds which elements of a tensor a strided
view of its storage reads. Most such views are slices and diagonals; only of others are the elements enumerated.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch._prims_common import make_contiguous_strides_for
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

GATHERS = frozenset({aten.as_strided.default, aten.as_strided_copy.default})
SCATTERS = frozenset({aten.as_strided_scatter.default})


@attrs.frozen
class StridedStep:
    """An operator of a view, and the one that writes through it.

    Args:
        view: from a tensor to a part of it.
        write: from the tensor and the new part to the new tensor.
    """

    view: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def read_through(steps: Sequence[StridedStep], x: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that a chain of views reads."""
    return functools.reduce(lambda part, step: step.view(part), steps, x)


def write_through(steps: Sequence[StridedStep], x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The tensor in which the part that a chain of views reads is `source`."""
    if not steps:
        return source
    first, *others = steps
    return first.write(x, write_through(others, first.view(x), source))


def views(
    like: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> tuple[StridedStep, ...] | None:
    """The slices, diagonals and permutations that are a strided view of the storage of a tensor; None if none are.

    Args:
        like: a tensor, of which only size, strides and storage offset matter.
        size, stride, offset: the arguments of `as_strided`; if None, the offset is that of `like`.

    >>> read_through(views(torch.empty(3, 4), (3,), (5,), None), torch.arange(12).view(3, 4))
    tensor([ 0,  5, 10])
    """
    start = 0 if offset is None else offset - int(like.storage_offset())
    shape, strides = tuple(like.shape), tuple(like.stride())
    if start < 0 or 0 in size or 0 in shape:
        return None
    found = _dimwise(shape, strides, size, stride, start)
    if found is not None or strides != make_contiguous_strides_for(shape):
        return found
    count = math.prod(shape)
    if tuple(stride) == make_contiguous_strides_for(tuple(size)):
        found = _dimwise((count,), (1,), (math.prod(size),), (1,), start)
        return None if found is None else (_reshape(shape, (count,)), *found, _reshape((math.prod(size),), size))
    for other in (_dims_of(count, stride), (count,)):
        found = _dimwise(other, make_contiguous_strides_for(other), size, stride, start)
        if found is not None:
            return (_reshape(shape, other), *found)
    return None


def _reshape(shape: Sequence[int], other: Sequence[int]) -> StridedStep:
    return StridedStep(lambda x: x.reshape(tuple(other)), lambda x, part: part.reshape(tuple(shape)))


def _dims_of(count: int, stride: Sequence[int]) -> tuple[int, ...]:
    """The shape of `count` contiguous elements whose dims have these strides; one dim if there is none.

    >>> _dims_of(24, (12, 1, 4))
    (2, 3, 4)
    """
    ends = sorted({count, 1, *stride} - {0}, reverse=True)
    whole = all(large % small == 0 for large, small in itertools.pairwise(ends)) and ends[0] == count
    return tuple(large // small for large, small in itertools.pairwise(ends)) if whole else (count,)


def _dimwise(
    shape: Sequence[int], strides: Sequence[int], size: Sequence[int], stride: Sequence[int], start: int
) -> tuple[StridedStep, ...] | None:
    """Find `views` in which each dim of the view moves along dims of the tensor of its own, inside of their bounds."""
    order = _outer_first(shape, strides)
    if order is None:
        return None
    starts = _digits(start, strides, order)
    steps = [_digits(step, strides, order) for step in stride]
    if starts is None:
        return None
    moved: dict[int, dict[int, int]] = {}
    for dim, (length, digits) in enumerate(zip(size, steps, strict=True)):
        if length > 1:
            if not digits:
                return None
            moved[dim] = digits
    taken = [own for digits in moved.values() for own in digits]
    ends = {own: starts.get(own, 0) + (size[dim] - 1) * digits[own] for dim, digits in moved.items() for own in digits}
    inside = all(ends.get(own, starts.get(own, 0)) < length for own, length in enumerate(shape))
    if len(taken) > len(set(taken)) or not inside:
        return None
    for dim, length in enumerate(size):  # a dim of one element is one of the tensor, or a new one
        own = next((own for own, step in enumerate(strides) if step == stride[dim] and own not in taken), None)
        if length == 1 and own is not None:
            moved[dim] = {own: 1}
            taken.append(own)
    return tuple(_chain(shape, size, starts, moved))


def _outer_first(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """The dims of more than one element by stride, the largest first; None if elements may share memory."""
    order = sorted((dim for dim, length in enumerate(shape) if length > 1), key=lambda dim: -strides[dim])
    reach = 0
    for dim in reversed(order):
        if strides[dim] <= reach:
            return None
        reach += strides[dim] * (shape[dim] - 1)
    return order


def _digits(distance: int, strides: Sequence[int], order: Sequence[int]) -> dict[int, int] | None:
    """By how many elements of each dim a distance in the storage moves; None if it does not end at an element."""
    found = {}
    for dim in order:
        count, distance = divmod(distance, strides[dim])
        if count:
            found[dim] = count
    return None if distance else found


def _chain(
    shape: Sequence[int], size: Sequence[int], starts: Mapping[int, int], moved: Mapping[int, Mapping[int, int]]
) -> Iterator[StridedStep]:
    """Slice each dim, drop those in which nothing moves, take diagonals, and bring the dims in order."""
    held = list(range(len(shape)))
    offsets: dict[int, int] = {}
    for dim, digits in moved.items():
        if (offset := _offset(shape, size[dim], starts, digits)) is not None:
            offsets[dim] = offset
            continue
        for own, step in digits.items():
            start = starts.get(own, 0)
            end = start + (size[dim] - 1) * step + 1
            if (start, end, step) != (0, shape[own], 1):
                yield _step(aten.slice.Tensor, aten.slice_scatter.default, own, start, end, step)
    for own in reversed(range(len(shape))):
        if all(own not in digits for digits in moved.values()):
            yield _step(aten.select.int, aten.select_scatter.default, own, starts.get(own, 0))
            held.remove(own)
    for dim, (first, *others) in moved.items():
        for other in others:  # the diagonal comes last, and goes on under the name of its first dim
            at = offsets.get(dim, 0), held.index(first), held.index(other)
            yield _step(aten.diagonal.default, aten.diagonal_scatter.default, *at)
            held = [own for own in held if own not in (first, other)] + [first]
    order = [held.index(next(iter(moved[dim]))) for dim in range(len(size)) if dim in moved]
    if order != sorted(order):
        yield _permutation(order)
    for dim in range(len(size)):
        if dim not in moved:
            yield StridedStep(functools.partial(_unsqueeze, dim), functools.partial(_squeeze, dim))


def _offset(shape: Sequence[int], length: int, starts: Mapping[int, int], digits: Mapping[int, int]) -> int | None:
    """The offset of a whole diagonal of a matrix, that a dim which moves so is; else None."""
    if list(digits.values()) != [1, 1]:
        return None
    row, column = (starts.get(own, 0) for own in digits)
    ends = min(shape[own] - start for own, start in zip(digits, (row, column), strict=True))
    return column - row if min(row, column) == 0 and length == ends else None


def _step(view: Any, write: Any, *arguments: int) -> StridedStep:
    return StridedStep(lambda x: view(x, *arguments), lambda x, part: write(x, part, *arguments))


def _permutation(order: Sequence[int]) -> StridedStep:
    back = [order.index(dim) for dim in range(len(order))]
    return StridedStep(lambda x: x.permute(*order), lambda x, part: part.permute(*back))


def _unsqueeze(dim: int, x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(dim)


def _squeeze(dim: int, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return part.squeeze(dim)


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
    if _outer_first(x.shape, x.stride()) is not None:
        return False
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
