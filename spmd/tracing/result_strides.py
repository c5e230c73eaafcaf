"""Strides of results, where torch's meta kernels give others than its CPU kernels.

Random operators draw in the order of memory, so later random numbers depend on these strides. The tables are what a
comparison of both kinds of kernels found, over torch's operators and operands of different memory orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes

from spmd.ir.graph import iterate_leaves
from spmd.ir.operator_kinds import VIEWS

aten = torch.ops.aten

_Like: TypeAlias = Callable[..., torch.Tensor]
"""From the tensor operands of a call, a tensor with the strides of the result."""


def _contiguous(*operands: torch.Tensor) -> torch.Tensor:
    return max(operands, key=torch.Tensor.dim).contiguous()


def _elementwise(*operands: torch.Tensor) -> torch.Tensor:
    """The order of TensorIterator over the operands, broadcast."""
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    if all(operand.shape == shape and operand.is_contiguous() for operand in operands):
        return torch.empty(shape, device="meta")  # with canonical strides, also in dims of length 1
    return _in_order(shape, [_broadcast_strides(operand, shape) for operand in operands])


def _channels_last(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The memory format of the first operand."""
    return x.contiguous(memory_format=suggest_memory_format(x))


def _volume(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A batch of volumes in its own memory format; one volume in the format of another."""
    if x.ndim == 5:
        return _channels_last(x)
    channels_last = like[None].is_contiguous(memory_format=torch.channels_last_3d) and not like.is_contiguous()
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if channels_last else x.contiguous()


def _indexed(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The order of `x[indices]`: that of TensorIterator over `x` and the indices, broadcast to the result's shape."""
    places = [place for place, index in enumerate(indices) if index is not None]
    given = torch.broadcast_tensors(*[index for index in indices if index is not None])
    before, count, ndim = places[0], len(places), given[0].ndim
    if places != list(range(before, before + count)):  # then the dims of the indices come first
        x, before = x.permute([*places, *(dim for dim in range(x.ndim) if dim not in places)]), 0
    after = before + count
    shape = (*x.shape[:before], *given[0].shape, *x.shape[after:])
    strides: list[Sequence[int]] = [(*x.stride()[:before], *[0] * ndim, *x.stride()[after:])]
    for index in given:
        placed = index.reshape((*[1] * before, *index.shape, *[1] * (x.ndim - after)))
        strides.append(_broadcast_strides(placed, shape))
    return _in_order(shape, strides)


def _rolled(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    """The memory format of `x`; contiguous if all of it is rolled as one dim."""
    return torch.empty_like(_channels_last(x) if dims else x.contiguous())


def _broadcast_strides(operand: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of an operand, which are 0 in dims along which it is broadcast."""
    new = len(shape) - operand.ndim
    sizes = zip(operand.stride(), operand.shape, shape[new:], strict=True)
    return (*[0] * new, *(0 if own == 1 != size else stride for stride, own, size in sizes))


def _in_order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> torch.Tensor:
    """A tensor of a shape, as TensorIterator allocates it for operands with these strides."""
    return torch.empty_strided(tuple(shape), dense_strides(shape, iteration_order(shape, strides)), device="meta")


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor with its dims in memory in an order, the outermost first."""
    strides, span = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], span = span, span * max(shape[dim], 1)
    return tuple(strides)


def iteration_order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """The dims from the outermost to the innermost, as TensorIterator sorts them: an insertion sort, in which the first
    operand decides that is not broadcast along either dim.
    """

    def compare(first: int, second: int) -> int:
        """1 if `first` is outside of `second`, -1 if it is inside, 0 if no operand decides."""
        for held in strides:
            if not held[first] or not held[second]:
                continue
            if held[first] != held[second]:
                return 1 if held[first] > held[second] else -1
            if shape[first] > shape[second]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]
    for start in range(1, len(shape)):
        moving = start
        for place in range(start - 1, -1, -1):
            found = compare(order[place], order[moving])
            if found > 0:
                order[place], order[moving] = order[moving], order[place]
                moving = place
            elif found < 0:
                break
    return order[::-1]


def _all(like: _Like, *ops: torch._ops.OpOverload) -> dict[torch._ops.OpOverload, _Like]:
    return dict.fromkeys(ops, like)


_LIKE: Mapping[torch._ops.OpOverload, _Like] = {
    **_all(
        _contiguous,
        aten.pow.Scalar, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
        aten.huber_loss_backward.default,
    ),
    **_all(
        _elementwise,
        aten.floor_divide.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
        aten.hardtanh_backward.default, aten.elu_backward.default, aten.softplus_backward.default,
    ),
    aten.native_dropout_backward.default: _elementwise,
    aten.threshold_backward.default: lambda grad, x: _elementwise(x, grad),
    **_all(
        _channels_last,
        aten.channel_shuffle.default, aten.native_channel_shuffle.default, aten.max_unpool2d.default,
        aten.replication_pad3d.default, aten.reflection_pad3d.default,
    ),
    **_all(
        lambda grad, x: _channels_last(x),
        aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default,
        aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default,
    ),
    **_all(
        lambda grad, x, *others: x.contiguous(),
        aten.glu_backward.default, aten._log_softmax_backward_data.default, aten.nll_loss2d_forward.default,
    ),
    **_all(lambda x, *others: x.contiguous(), aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar),
    aten.log_sigmoid_forward.default: _contiguous,
    aten.max_pool3d_with_indices.default: lambda x: _volume(x, x),
    aten.max_pool3d_with_indices_backward.default: lambda grad, x, indices: _volume(x, grad),
    aten.angle.default: lambda x: x.contiguous() if x.is_complex() else x,
    aten.binary_cross_entropy.default: lambda x, *others: x,
    aten.binary_cross_entropy_backward.default: lambda grad, x, *others: x,
}  # fmt: skip


_BY_ARGUMENTS: Mapping[torch._ops.OpOverload, _Like] = {
    aten.index.Tensor: _indexed,
    aten._unsafe_index.Tensor: _indexed,
    aten.roll.default: _rolled,
}
"""From all arguments of a call, a tensor with the strides of the result."""


_OF_FIRST = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.clone.default})
"""Pointwise operators whose results have the strides of their first operand, not those of TensorIterator."""


def _viewed(output: torch.Tensor, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A view with the strides of its dims of length 1 as in C++; kernels read them to tell memory formats apart."""
    if 1 not in output.shape:
        return output
    with _disable_current_modes():
        strides = torch.empty_strided(x.shape, x.stride(), device="meta").view(shape).stride()
    return output if strides == output.stride() else output.as_strided(output.shape, strides)


def _is_simple(operands: Sequence[torch.Tensor]) -> bool:
    """Whether the operands of a pointwise operator have the same strides, which its meta kernel gives its result."""
    layouts = {(operand.shape, operand.stride()) for operand in operands}
    return len(layouts) < 2 and not any(1 in shape for shape, _ in layouts)


def with_kernel_strides(func: Any, args: Sequence[Any], outputs: Any) -> Any:
    """The fake results of an operator with the strides of its CPU kernel; the same tensors if they have them."""
    if func in VIEWS:
        return _viewed(outputs, *args)
    pointwise = torch.Tag.pointwise in func.tags
    if not pointwise and func not in _LIKE and func not in _BY_ARGUMENTS:
        return outputs
    operands = [leaf for leaf in iterate_leaves(tuple(args)) if isinstance(leaf, torch.Tensor)]
    if any(operand.device.type != "cpu" for operand in operands):
        return outputs
    if func in _LIKE:
        wanted = torch.empty_like(_LIKE[func](*operands))  # dense, in the same order
    elif pointwise:
        if func in _OF_FIRST or _is_simple(operands):
            return outputs
        wanted = _elementwise(*operands)
    elif any(operand.dtype in (torch.bool, torch.uint8) for operand in operands[1:]):
        return outputs  # masks count as the indices of what is true
    else:
        wanted = _BY_ARGUMENTS[func](*args)

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim != wanted.ndim:
            return leaf
        order = sorted(range(leaf.ndim), key=wanted.stride, reverse=True)
        strides = wanted.stride() if leaf.shape == wanted.shape else dense_strides(leaf.shape, order)
        return torch.empty_strided(leaf.shape, strides, dtype=leaf.dtype, device=leaf.device)

    return tuple(map(placed, outputs)) if isinstance(outputs, (tuple, list)) else placed(outputs)
