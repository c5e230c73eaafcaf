"""Strides of results, where torch's meta kernels give others than its CPU kernels.

Random operators draw in the order of memory, so later random numbers depend on these strides. The tables are what a
comparison of both kinds of kernels found, over torch's operators and operands of different memory orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from spmd.ir.graph import iterate_leaves

aten = torch.ops.aten

_Like: TypeAlias = Callable[..., torch.Tensor]
"""From the tensor operands of a call, a tensor with the strides of the result."""


def _contiguous(*operands: torch.Tensor) -> torch.Tensor:
    return max(operands, key=torch.Tensor.dim).contiguous()


def _elementwise(*operands: torch.Tensor) -> torch.Tensor:
    """The order of the first operand that has one, as of all kernels by TensorIterator."""
    return torch.add(*operands) if len(operands) == 2 else operands[0]


def _channels_last(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """The memory format of the first operand."""
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x if last else x.contiguous()


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
        aten.div.Tensor_mode, aten.floor_divide.default, aten.copysign.Tensor, aten.xlogy.Tensor,
        aten.special_xlog1py.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
        aten.hardtanh_backward.default, aten.elu_backward.default, aten.softplus_backward.default,
        aten.logit_backward.default,
    ),
    **_all(
        _channels_last,
        aten.channel_shuffle.default, aten.native_channel_shuffle.default, aten.max_unpool2d.default,
    ),
    aten.log_sigmoid_forward.default: _contiguous,
    aten.binary_cross_entropy.default: lambda x, *others: x,
    aten.binary_cross_entropy_backward.default: lambda grad, x, *others: x,
}  # fmt: skip


def with_kernel_strides(func: Any, args: Sequence[Any], outputs: Any) -> Any:
    """The fake results of an operator with the strides of its CPU kernel; the same tensors if they have them."""
    like = _LIKE.get(func)
    if like is None:
        return outputs
    operands = [leaf for leaf in iterate_leaves(tuple(args)) if isinstance(leaf, torch.Tensor)]
    if any(operand.device.type != "cpu" for operand in operands):
        return outputs
    wanted = torch.empty_like(like(*operands))  # dense, in the same order

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim != wanted.ndim:
            return leaf
        order = sorted(range(leaf.ndim), key=wanted.stride, reverse=True)
        made = torch.empty([leaf.shape[dim] for dim in order], dtype=leaf.dtype, device=leaf.device)
        return made.permute([order.index(dim) for dim in range(leaf.ndim)])

    return tuple(map(placed, outputs)) if isinstance(outputs, (tuple, list)) else placed(outputs)
