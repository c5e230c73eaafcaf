"""Pads, interpolation and uneven averages along a sharded spatial dim, by exchanges of the rows that results read.

A result row is a weighted sum of a few rows of the image, which are functions of its index. The operators are
separable: along a dim that is not resized they copy. So a rank gathers the rows that its results read, the
operator resizes the other dims, and rows are looked up along this one. Gradients are gathered by what was read, before
or after the other dims, whichever makes rows shorter.
"""

from __future__ import annotations

import math
import re
import struct
from functools import cache
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from spmd.collectives import shard_offset
from spmd.ir.call import Call
from spmd.rules.notation import operand_names
from spmd.rules.ops.by_rank import by_rank, chunks
from spmd.rules.ops.one_dim import resized
from spmd.rules.ops.space import cropped_like, least, over_space, position, replaced, space
from spmd.rules.ops.window_exchange import FILL, Interval, WindowExchange, windows
from spmd.rules.rule import Axes

_ADAPTIVE = "_adaptive_avg_pool"
"""The mode of averages of which windows have different widths; of equal ones, `spmd.rules.ops.sliding` has them."""

_MOST_TAPS = 8
"""The most rows of an image that a result is computed from one by one."""

_Tap: TypeAlias = tuple[Tensor, Tensor | None]
"""For each result row, an image row and its weight; None for weights of 1."""

_Span: TypeAlias = tuple[int, int]


@attrs.frozen
class _Sampling:
    """The rows along a dim of an image that each result row reads.

    Args:
        size: the length of the dim of the image.
        count: the number of results.
        mode: the operator's name, without its number of dims.
        before: the number of rows that a pad adds before the first one.
        scale: the scale factor that an interpolation was given.
        corners: its `align_corners`.
    """

    size: int
    count: int
    mode: str
    before: int = 0
    scale: float | None = None
    corners: bool = False

    @classmethod
    def of(cls, call: Call, dim: int) -> _Sampling:
        """The sampling of an operator, or of the backward operator of one, along a dim of its operands."""
        mode = _name(call)
        operands = dict(zip(operand_names(call), call.operands, strict=True))
        space = dim - call.operands[0].ndim
        if "pad" in mode:
            size, pad = operands["self"].shape[dim], call.argument("padding")
            before, after = pad[-2 * space - 2], pad[-2 * space - 1]
            return cls(size, size + before + after, mode, before)
        size = operands["self"].shape[dim] if "self" in operands else call.argument("input_size")[space]
        if mode == _ADAPTIVE:
            count = (
                operands["grad_output"].shape[dim] if "grad_output" in operands else call.argument("output_size")[space]
            )
            return cls(size, count, mode)
        scale = call.argument(call.op._schema.arguments[space].name)
        count = call.argument("output_size")[space]
        return cls(size, count, mode, 0, scale, call.argument("align_corners", False))

    @property
    def width(self) -> int:
        """The most rows that a result of an adaptive average is a mean of."""
        return -(-self.size // self.count) + (1 if self.size % self.count else 0)

    @property
    def is_identity(self) -> bool:
        """Test for results that are the rows of the image."""
        return self.size == self.count and not self.before

    def taps(self, rows: Tensor, dtype: torch.dtype) -> list[_Tap]:
        """The rows of the image that the result rows read, computed as torch's kernels do.

        Args:
            rows: indices of result rows, int64.
            dtype: that of the image.
        """
        last = self.size - 1
        if self.mode == "reflection_pad":
            return [(last - (last - (rows - self.before).abs()).abs(), None)]
        if self.mode == "replication_pad":
            return [((rows - self.before).clamp(0, last), None)]
        if self.mode == _ADAPTIVE:
            first, end = rows * self.size // self.count, -(-(rows + 1) * self.size // self.count)
            count = (end - first).to(torch.float64 if dtype == torch.float64 else torch.float32)
            weights = [(first + n < end) / count for n in range(self.width)]
            return [((first + n).clamp(max=last), weight) for n, weight in enumerate(weights)]
        if self.mode == "upsample_nearest":
            places = (rows.to(torch.float32) * self._step(torch.float32)).floor()
            return [(places.long().clamp(max=last), None)]
        if self.mode == "_upsample_nearest_exact":
            places = ((rows.to(torch.float64) + 0.5) * self._step(torch.float32)).to(torch.float32).floor()
            return [(places.long().clamp(max=last), None)]
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        places = (
            rows.to(exact) * self._step(exact) if self.corners else (rows + 0.5).to(exact) * self._step(exact) - 0.5
        )
        if self.mode == "upsample_bicubic":
            first = places.floor()
            weights = _cubic(places - first)
            return [((first.long() + n - 1).clamp(0, last), weight) for n, weight in enumerate(weights)]
        places = places.clamp(min=0)
        first = places.long().clamp(max=last)
        weight = (places - first).clamp(0, 1)
        return [(first, 1 - weight), ((first + 1).clamp(max=last), weight)]

    def _step(self, dtype: torch.dtype) -> float:
        """The distance of the places that neighbouring results read, rounded to `dtype`."""
        if self.corners:
            step = (self.size - 1) / (self.count - 1) if self.count > 1 else 0.0
        else:
            step = 1 / self.scale if self.scale else self.size / self.count
        return step if dtype == torch.float64 else float(struct.unpack("f", struct.pack("f", step))[0])


def _cubic(t: Tensor) -> list[Tensor]:
    """The weights of the four rows around a place, `t` after the second one (Keys, 1981, with a = -0.75)."""
    a = -0.75
    near = lambda x: ((a + 2) * x - (a + 3)) * x * x + 1  # noqa: E731
    far = lambda x: ((a * x - 5 * a) * x + 8 * a) * x - 4 * a  # noqa: E731
    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _name(call: Call) -> str:
    """The operator's name without its number of dims."""
    return re.sub(r"\dd(_backward)?$", "", call.op.overloadpacket.__name__)


@cache
def _spans(sampling: _Sampling, dtype: torch.dtype, bounds: tuple[_Span, ...], backward: bool) -> list[_Span]:
    """The image rows that the result rows within each of the bounds read; backward, the result rows that read those."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        places = torch.stack([place for place, _ in sampling.taps(torch.arange(sampling.count), dtype)])
        first, last = places.amin(0), places.amax(0)
        spans = []
        for start, stop in bounds:
            if backward:
                found = ((first < stop) & (last >= start)).nonzero()
            else:
                found = torch.cat([first[start:stop], last[start:stop]])
            spans.append((int(found.min()), int(found.max()) + 1) if start < stop and len(found) else (0, 0))
        return spans


def _gathered(
    axes: Axes, sampling: _Sampling, dim: int, x: Tensor, rows: int, backward: bool = False
) -> tuple[Tensor, Tensor | int]:
    """The rows of `x` that `rows` results read, or that read this rank's `rows` image rows, and the index of the first.

    Windows of ranks with as many rows have one length.
    """
    size, count = (sampling.count, sampling.size) if backward else (sampling.size, sampling.count)
    bounds = tuple(chunks(count, axes))
    spans = dict(zip(bounds, _spans(sampling, x.dtype, bounds, backward), strict=True))
    lengths: dict[int, int] = {}
    for (start, stop), (first, end) in spans.items():
        lengths[stop - start] = max(lengths.get(stop - start, 0), end - first)

    def intervals(start: int, stop: int) -> list[Interval]:
        first, end = spans[start, stop]
        missing = lengths[stop - start] - (end - first)
        return [(0, first, end), (FILL, 0, missing)]

    window = WindowExchange(dim, axes, (size,), windows(count, axes, intervals))([x], lengths.get(rows, 0))
    return window, by_rank([spans[bound][0] for bound in bounds], axes, x.device)


def _weighted(x: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    if weight is None:
        return x
    return x.to(weight.dtype) * weight.view(-1, *(1,) * (x.ndim - 1 - dim))


def _sample(axes: Axes, call: Call, inner: Any, dim: int, x: Tensor, *args: Any) -> Tensor:
    """The operator along `dim`: after it has resized the other dims of a window."""
    sampling, rows = _Sampling.of(call, dim), call.results[0].shape[dim]
    if sampling.is_identity:
        return cropped_like(call, _resized(call, inner, dim, x, *args), x, dim, rows)
    window, first = _gathered(axes, sampling, dim, x, rows)
    window = _resized(call, inner, dim, window, *args)
    places = torch.arange(rows, device=x.device) + shard_offset(sampling.count, axes)
    total: Any = None
    for place, weight in sampling.taps(places, x.dtype):
        read = window.index_select(dim, (place - first).clamp(0, window.shape[dim] - 1))
        read = _weighted(read, weight, dim)
        total = read if total is None else total + read
    return cropped_like(call, total.to(x.dtype), x, dim, rows)


def _resized(call: Call, inner: Any, dim: int, x: Tensor, *args: Any) -> Tensor:
    """`x`, resized along all spatial dims but `dim`."""
    found = tuple(least(call, arg, dim) if isinstance(arg, Tensor) else arg for arg in (x, *args))
    x = found[0]
    number, rows, ndim = dim - x.ndim, x.shape[dim], len(call.op._schema.arguments)
    if "pad" in _name(call):
        found = replaced(call, found, "padding", {-2 * number - 2: 0, -2 * number - 1: 0})
        return inner(*found) if any(found[-1]) else x  # type: ignore[no-any-return]
    if space(call) == 1:
        return x
    sizes = {number: rows} | {i - x.ndim: size for i, size in enumerate(x.shape[: -space(call)])}
    found = replaced(call, replaced(call, found, "output_size", {number: rows}), "input_size", sizes)
    if _name(call) != _ADAPTIVE:
        found = tuple(None if place == ndim + number else argument for place, argument in enumerate(found))
    return inner(*found)  # type: ignore[no-any-return]


def _sample_backward(axes: Axes, call: Call, inner: Any, dim: int, grad: Tensor, *args: Any) -> Tensor:
    """The gradient along `dim`: before the operator has resized the other dims, or after it if it shrinks them."""
    sampling, rows = _Sampling.of(call, dim), call.results[0].shape[dim]
    if sampling.is_identity:
        return cropped_like(call, _resized(call, inner, dim, grad, *args), grad, dim, rows)
    shrinks = _shrinks(call, dim)
    if shrinks:
        grad = cropped_like(call, _resized(call, inner, dim, grad, *args), grad, dim, grad.shape[dim])
    window, first = _gathered(axes, sampling, dim, grad, rows, backward=True)
    own = shard_offset(sampling.size, axes)
    places = torch.arange(window.shape[dim], device=grad.device) + first
    # Rows of other ranks' shards are added to one row before this rank's shard, and one after it.
    taps = sampling.taps(places, grad.dtype)
    dtype = grad.dtype if taps[0][1] is None else taps[0][1].dtype
    sums = window.new_zeros(resized(grad.shape, dim, rows + 2), dtype=dtype)
    for place, weight in taps:
        sums = sums.index_add(dim, (place - own + 1).clamp(0, rows + 1), _weighted(window, weight, dim))
    sums = sums.narrow(dim, 1, rows).to(grad.dtype)
    return sums if shrinks else cropped_like(call, _resized(call, inner, dim, sums, *args), grad, dim, rows)


def _shrinks(call: Call, dim: int) -> bool:
    """Test a gradient for fewer elements in a row of `dim` than its cotangent has; by global sizes, on all ranks."""
    if position(call, "input_size") is None:
        return False
    others = [other for other in range(-space(call), 0) if other != dim - call.operands[0].ndim]
    large, small = call.argument("output_size"), call.argument("input_size")
    return math.prod(small[other] for other in others) < math.prod(large[other] for other in others)


def _is_near(call: Call, dim: int) -> bool:
    sampling = _Sampling.of(call, dim)
    if "pad" in sampling.mode:
        return 2 * sampling.size >= sampling.count
    if sampling.mode == _ADAPTIVE:
        return 0 < sampling.count and 0 < sampling.size % sampling.count and sampling.width <= _MOST_TAPS
    return call.results[0].dtype.is_floating_point or "nearest" in sampling.mode


sample, sample_backward = over_space(_is_near, _sample), over_space(_is_near, _sample_backward)
