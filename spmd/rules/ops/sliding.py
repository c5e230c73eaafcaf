"""Pooling and unfolding along a sharded dim: local implementations that exchange the borders of shards.

The windows of a rank's results are gathered (`Halo.gather`), the operator pools them without padding, and gradients go
back the same way (`Halo.scatter`). Positions of maxima count through all spatial dims. They are converted one dim at a
time, leading dims outside of later ones: so the sizes of later dims are global, whichever of them are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import Shard
from spmd.ir.call import Call
from spmd.rules.nested import Along
from spmd.rules.notation import operand_names
from spmd.rules.ops.halo import Halo
from spmd.rules.ops.one_dim import padded, resized
from spmd.rules.ops.space import cropped_like, least, over_space, position, replaced, space
from spmd.rules.rule import Axes, Row

aten = torch.ops.aten


@attrs.frozen
class _Kernel:
    """A pooling kernel along one dim.

    Args:
        size: the length of the dim of the image.
        count: the number of results.
        width, stride, padding, dilation: the kernel's; 0 for adaptive kernels of different widths.
    """

    size: int
    count: int
    width: int
    stride: int
    padding: int = 0
    dilation: int = 1

    @classmethod
    def of(cls, call: Call, dim: int) -> _Kernel:
        """The kernel of a pooling operator, or of its backward operator, along a dim of its operands."""
        operands = dict(zip(operand_names(call), call.operands, strict=True))
        image = operands["self"]
        number, size = dim - image.ndim, image.shape[dim]
        if position(call, "kernel_size") is None:
            count = operands["grad_output"].shape[dim] if "grad_output" in operands else call.argument("output_size")
            count = count if isinstance(count, int) else _pick(count, number)
            width = 0 if not count or size % count else size // count
            return cls(size, count, width, width)
        width, padding = (_pick(call.argument(name), number) for name in ("kernel_size", "padding"))
        stride = _pick(call.argument("stride") or call.argument("kernel_size"), number)
        dilation = _pick(call.argument("dilation", [1]), number)
        free = size + 2 * padding - (width - 1) * dilation - 1 + (stride - 1 if call.argument("ceil_mode") else 0)
        count = free // stride + 1
        overhangs = call.argument("ceil_mode") and (count - 1) * stride >= size + padding
        return cls(size, count - 1 if overhangs else count, width, stride, padding, dilation)

    @property
    def is_aligned(self) -> bool:
        """True if most windows are near the same part of their dim as their results."""
        covered = self.count * self.stride
        return 0 < covered <= 2 * self.size and self.size <= 2 * covered

    def halo(self, dim: int, axes: Axes) -> Halo:
        """The exchange of windows between the image and the results."""
        return Halo(dim, axes, self.count, self.size, self.stride, self.padding, (self.width - 1) * self.dilation)

    def start(self, axes: Axes) -> Any:
        """The first row of this rank's window."""
        return shard_offset(self.count, axes) * self.stride - self.padding

    def averaged(self, call: Call, axes: Axes, like: Tensor, dim: int) -> Tensor | None:
        """The factor by which each result along `dim` is more than the mean of the whole kernel; None if 1 everywhere.

        Kernels that reach beyond the image divide by the number of rows inside, or inside of the padding.
        """
        padding = self.padding if call.argument("count_include_pad", True) else 0
        first, end = (-self.padding, (self.count - 1) * self.stride - self.padding + self.width)
        if call.argument("divisor_override", None) is not None or (-padding <= first and end <= self.size + padding):
            return None
        places = torch.arange(max(like.shape[dim], 1), device=like.device) * self.stride + self.start(axes)
        inside = (places + self.width).clamp(max=self.size + padding) - places.clamp(min=-padding)
        factor = (self.width / inside.to(like.dtype)).narrow(0, 0, like.shape[dim])
        return factor.view(-1, *(1,) * (like.ndim - 1 - dim))


def _pick(values: Sequence[int], number: int) -> int:
    """The entry of a dim, counted from the last one, in an argument of one or as many entries as dims."""
    return values[0] if len(values) == 1 else values[number]


def _local(call: Call, args: Sequence[Any], dim: int, rows: int) -> tuple[Any, ...]:
    """The arguments of the operator that computes `rows` results along `dim` from a window that has all their rows."""
    number = dim - call.operands[0].ndim
    return replaced(call, replaced(call, args, "padding", {number: 0}), "output_size", {number: rows})


def _average(axes: Axes, call: Call, inner: Any, dim: int, x: Tensor, *args: Any) -> Tensor:
    kernel, rows = _Kernel.of(call, dim), call.results[0].shape[dim]
    window = kernel.halo(dim, axes).gather(least(call, x, -1), max(rows, 1))
    y = cropped_like(call, inner(window, *_local(call, (x, *args), dim, max(rows, 1))[1:]), x, dim, rows)
    factor = kernel.averaged(call, axes, y, dim)
    return y if factor is None else y * factor


def _average_backward(axes: Axes, call: Call, inner: Any, dim: int, grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    kernel = _Kernel.of(call, dim)
    factor = kernel.averaged(call, axes, grad, dim)
    return _backward(kernel, axes, call, inner, dim, grad if factor is None else grad * factor, x, *args)


def _backward(
    kernel: _Kernel, axes: Axes, call: Call, inner: Any, dim: int, grad: Tensor, x: Tensor, *args: Any
) -> Tensor:
    """The gradient of the window, of whose values the operator does not read any, added up where windows overlap."""
    halo, rows = kernel.halo(dim, axes), x.shape[dim]
    grad, image = least(call, grad, dim), least(call, x, -1)
    window = image.new_empty(resized(image.shape, dim, halo.length(grad.shape[dim])))
    local = _local(call, (grad, window, *args), dim, 0)
    return cropped_like(call, halo.scatter(inner(*local), rows), x, dim, rows)


def _largest(axes: Axes, call: Call, inner: Any, dim: int, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    kernel, rows = _Kernel.of(call, dim), call.results[0].shape[dim]
    fill = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    window = kernel.halo(dim, axes).gather(least(call, x, -1), max(rows, 1), fill)
    found = inner(window, *_local(call, (x, *args), dim, max(rows, 1))[1:])
    y, places = (cropped_like(call, result, x, dim, rows) for result in found)
    length, start, row = window.shape[dim], kernel.start(axes), _row(call, dim)
    plane = 0 if dim == x.ndim - space(call) else places // (length * row)
    places = places + (start * row - plane * (length * row))
    if kernel.padding:  # a kernel over nothing but -inf returns its first place, here one in the padding
        places = torch.where(places < 0, places.remainder(kernel.dilation * row), places)
    return y, places + plane * (kernel.size * row)


def _largest_backward(axes: Axes, call: Call, inner: Any, dim: int, grad: Tensor, x: Tensor, *args: Any) -> Tensor:
    kernel, row = _Kernel.of(call, dim), _row(call, dim)
    length = (max(grad.shape[dim], 1) - 1) * kernel.stride + (kernel.width - 1) * kernel.dilation + 1
    *args, places = args  # type: ignore[assignment]
    plane = 0 if dim == x.ndim - space(call) else places // (kernel.size * row)
    places = places - plane * ((kernel.size - length) * row) - kernel.start(axes) * row
    return _backward(kernel, axes, call, inner, dim, grad, x, *args, least(call, places, dim))


def _row(call: Call, dim: int) -> int:
    """The number of places in one row of `dim` of the image."""
    return math.prod(call.operands[operand_names(call).index("self")].shape[dim + 1 :])


def _unfold(axes: Axes, call: Call, inner: Any, dim: int, x: Tensor, *args: Any) -> Tensor:
    kernel, rows = _windows(call), call.results[0].shape[dim]
    return inner(kernel.halo(dim, axes).gather(x, max(rows, 1)), *args).narrow(dim, 0, rows)  # type: ignore[no-any-return]


def _unfold_backward(axes: Axes, call: Call, inner: Any, dim: int, grad: Tensor, _: Any, *args: Any) -> Tensor:
    kernel, grad = _windows(call), padded(grad, dim, 0, 0 if grad.shape[dim] else 1)
    length = (grad.shape[dim] - 1) * kernel.stride + kernel.width
    window = inner(grad, resized(grad.shape[:-1], dim, length), *args)
    return kernel.halo(dim, axes).scatter(window, call.results[0].shape[dim])


def _windows(call: Call) -> _Kernel:
    """The windows of `unfold`, or of its backward operator."""
    sizes = call.operands[0].shape if position(call, "self") is not None else call.argument("input_sizes")
    size, width, step = sizes[_unfolded(call)], call.argument("size"), call.argument("step")
    return _Kernel(size, (size - width) // step + 1, width, step)


def _unfolded(call: Call) -> int:
    """The dim that `unfold`, or its backward operator, is along."""
    name = "dimension" if position(call, "dim") is None else "dim"
    return int(call.argument(name)) % min(call.operands[0].ndim, call.results[0].ndim)


def unfold_windows(call: Call) -> Iterator[Row]:
    """An `unfold`, or its backward operator, whose windows are near their results."""
    if min(call.operands[0].ndim, call.results[0].ndim) and _windows(call).is_aligned:
        dim, backward = _unfolded(call), position(call, "self") is None
        yield Row((Shard(dim),), (Shard(dim),), Along(dim, _unfold_backward if backward else _unfold))


def _is_aligned(call: Call, dim: int) -> bool:
    return _Kernel.of(call, dim).is_aligned


average, average_backward = over_space(_is_aligned, _average), over_space(_is_aligned, _average_backward)
largest, largest_backward = over_space(_is_aligned, _largest), over_space(_is_aligned, _largest_backward)
