"""What is called in place of single operators that torch's functionalization or its meta kernels handle wrongly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import canonicalize_dim

from spmd.errors import TraceError
from spmd.tracing.fused_optimizers import FUSED_DECOMPOSITIONS
from spmd.tracing.source import where

aten = torch.ops.aten


def _bernoulli(x: torch.Tensor, p: float = 0.5) -> Any:
    """In-place bernoulli in the order of memory; unlike other random operators, its functional form ignores strides."""
    if x.is_contiguous():
        return NotImplemented
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    drawn = x.new_empty([x.shape[dim] for dim in order]).bernoulli_(p)
    return x.copy_(drawn.permute([order.index(dim) for dim in range(x.ndim)]))


def _lerp(x: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    """In-place lerp without torch's meta kernel, whose overload resolution prints tensors and fails in forward mode."""
    return x.copy_(torch.lerp(x, end, weight))


def _restrided(op: Any, positions: Sequence[int], of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """An implementation of `op` whose fake results have the strides of torch's CPU kernels.

    The meta kernels copy the strides of some operands, so these operands are converted first.

    Args:
        op: the operator.
        positions: the positions of these operands.
        of: converts an operand to the strides of the CPU kernel's result.
    """

    def body(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for position in positions:
            if isinstance(given[position], torch.Tensor) and given[position].device.type == "cpu":
                given[position] = of(given[position])
        changed = any(new is not old for new, old in zip(given, args, strict=True))
        return op(*given, **kwargs) if changed else NotImplemented

    return body


def _in_memory_format(x: torch.Tensor) -> torch.Tensor:
    images = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim, torch.contiguous_format)
    return x if x.is_contiguous(memory_format=images) else x.contiguous()


def _expand(x: torch.Tensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    """New dims of length 1, where nothing is repeated: torch would write `old + (new - old)` through the view."""
    added = len(size) - x.ndim
    if added < 0 or any(length != 1 for length in size[:added]):
        return NotImplemented
    if any(length not in (-1, old) for length, old in zip(size[added:], x.shape, strict=True)):
        return NotImplemented
    return x[(None,) * added] if added else aten.alias.default(x)


def _multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int) -> Any:
    """The loss of one sample without a batch dim, for which torch's meta kernel returns a wrong number of dims."""
    if x.ndim > 1:
        return NotImplemented
    loss, targets = aten.multilabel_margin_loss_forward.default(x.reshape(1, -1), target.reshape(1, -1), reduction)
    return loss.reshape(()), targets.reshape(x.shape)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    """Raise torch's error for a dim that there is not, which its meta kernel does not."""
    canonicalize_dim(x.ndim, dim)
    return NotImplemented


def _cdist_backward(grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distances: torch.Tensor) -> Any:
    """Raise for a batch of cotangents: torch's vmap rule returns the gradient of their sum for each of them."""
    if grad.ndim > distances.ndim:
        raise TraceError(
            f"The gradient of torch.cdist at {where()} for several cotangents at once, as jacrev and vmap of pullbacks "
            "ask for it, is wrong in torch. Compute the distances as torch.linalg.vector_norm(a[:, None] - b, dim=-1)."
        )
    return NotImplemented


def _fused_optimizer(functional: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, Callable[..., Any]]:
    """A fused optimizer that writes in place, and its step as its decomposition and copies.

    Torch has no meta kernel for some, and for the others takes an empty list for one of other tensors.
    """
    op = getattr(getattr(aten, f"{functional.overloadpacket.__name__}_"), functional._overloadname)
    has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta")

    def step(*args: Any, **kwargs: Any) -> Any:
        if has_meta and all(args):
            return NotImplemented
        for targets, results in zip(args, FUSED_DECOMPOSITIONS[functional](*args, **kwargs), strict=False):
            for target, result in zip(targets, results, strict=True):
                target.copy_(result)
        return None

    return op, step


def _fake_quantized(x: torch.Tensor, *args: Any) -> Any:
    """Give the statistics of channels their shape at the first call, which torch's meta kernel does not."""
    _, _, low, high, scale, zero_point, _, _, _, axis, per_channel, *_ = (*args, False)
    if not per_channel or low.numel():
        return NotImplemented
    for statistic, value in ((low, float("inf")), (high, -float("inf")), (scale, 1), (zero_point, 0)):
        statistic.resize_(x.shape[axis]).fill_(value)
    return aten._fused_moving_avg_obs_fq_helper.default(x, *args)


_STRIDES = (
    ((0,), _in_memory_format, (
        aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default,
        aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default,
    )),
    ((0, 1), _in_memory_format, (aten.native_batch_norm_backward.default,)),
    ((0, 1, 5), _in_memory_format, (aten.native_layer_norm_backward.default,)),
    ((0, 1), torch.Tensor.contiguous, (aten.normal.float_Tensor, aten.normal.Tensor_Tensor)),
)  # fmt: skip
"""Positions of operands, the conversion of their strides, and the operators; see `_restrided`."""

REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: _bernoulli,
    aten.expand.default: _expand,
    aten.lerp_.Scalar: _lerp,
    aten.lerp_.Tensor: _lerp,
    **dict(map(_fused_optimizer, FUSED_DECOMPOSITIONS)),
    **{op: _restrided(op, positions, of) for positions, of, ops in _STRIDES for op in ops},
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten._cdist_backward.default: _cdist_backward,
    aten._fused_moving_avg_obs_fq_helper.default: _fake_quantized,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
}
"""Replacements for operators; one returns NotImplemented for calls that torch itself handles correctly."""
