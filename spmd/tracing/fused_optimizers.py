"""Decompositions of torch's fused optimizers into list operators, with the arithmetic of torch's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

aten = torch.ops.aten

Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]


def _widened(tensors: Tensors) -> Tensors:
    """Half-precision tensors as float32: torch's kernels compute in float32 and round results when they store them."""
    return [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in tensors]


def _scalars(value: Any, like: Tensors) -> list[Tensor]:
    """One 0-d tensor for each of `like`, in its dtype, from a single 0-d tensor or from one for each."""
    values = value if isinstance(value, (list, tuple)) else [value] * len(like)
    return [scalar.to(x.dtype) for scalar, x in zip(values, like, strict=True)]


def _scaled(tensors: Tensors, by: float | Tensor) -> Tensors:
    return torch._foreach_mul(tensors, _scalars(by, tensors) if isinstance(by, Tensor) else by)  # type: ignore[arg-type]


def _unscaled(grads: Tensors, grad_scale: Tensor | None) -> Tensors:
    return grads if grad_scale is None else torch._foreach_div(grads, _scalars(grad_scale.reshape(()), grads))


def _finished(old: Sequence[Tensors], new: Sequence[Tensors], found_inf: Tensor | None) -> list[list[Tensor]]:
    """The new values in the dtypes of the old ones; the old values if `found_inf` is 1."""
    found = []
    for before, after in zip(old, new, strict=True):
        stored = [x.to(kept.dtype) for x, kept in zip(after, before, strict=True)]
        if found_inf is not None:
            keep = found_inf.reshape(()) == 1
            stored = [torch.where(keep, kept, x) for x, kept in zip(stored, before, strict=True)]
        found.append(stored)
    return found


def _sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: float | Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[list[Tensor]]:
    old = (params, grads, buffers)
    grads = _unscaled(grads, grad_scale)
    p, g, b = map(_widened, (params, grads, buffers))
    if maximize:
        g = torch._foreach_neg(g)
    if weight_decay != 0:
        g = torch._foreach_add(g, p, alpha=weight_decay)
    if momentum != 0:
        b = g if is_first_step else torch._foreach_add(torch._foreach_mul(b, momentum), g, alpha=1 - dampening)
        g = torch._foreach_add(g, b, alpha=momentum) if nesterov else b
    p = torch._foreach_add(p, _scaled(g, -lr))
    return _finished(old, (p, grads, b), found_inf)


def _adam(decoupled: bool) -> Callable[..., Any]:
    """Adam, or AdamW if weight decay is decoupled from the gradient."""

    def body(
        params: Tensors,
        grads: Tensors,
        means: Tensors,
        squares: Tensors,
        largest: Tensors,
        steps: Tensors,
        *,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> list[list[Tensor]]:
        old = (params, grads, means, squares, largest)
        grads = _unscaled(grads, grad_scale)
        p, g, m, v, top = map(_widened, (params, grads, means, squares, largest))
        if maximize:
            g = torch._foreach_neg(g)
        if weight_decay != 0:
            p, g = _decayed(p, g, lr, weight_decay, decoupled)
        m = torch._foreach_lerp(m, g, 1 - beta1)
        v = torch._foreach_addcmul(torch._foreach_mul(v, beta2), g, g, 1 - beta2)
        top = torch._foreach_maximum(top, v) if amsgrad else top
        counts = [step.reshape(()).double() for step in steps]
        first, second = ([1 - power for power in torch._foreach_pow(beta, counts)] for beta in (beta1, beta2))
        root = torch._foreach_div(torch._foreach_sqrt(top if amsgrad else v), _scalars([x.sqrt() for x in second], p))
        step = torch._foreach_mul(m, _scalars([-lr / x for x in first], p))
        p = torch._foreach_add(p, torch._foreach_div(step, torch._foreach_add(root, eps)))
        return _finished(old, (p, grads, m, v, top), found_inf)

    return body


def _adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    lr: float | Tensor,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> list[list[Tensor]]:
    old = (params, grads, sums)
    grads = _unscaled(grads, grad_scale)
    p, g, s = map(_widened, (params, grads, sums))
    if maximize:
        g = torch._foreach_neg(g)
    if weight_decay != 0:
        g = torch._foreach_add(g, p, alpha=weight_decay)
    s = torch._foreach_addcmul(s, g, g)
    rates = [-lr / (1 + (step.reshape(()).double() - 1) * lr_decay) for step in steps]
    root = torch._foreach_add(torch._foreach_sqrt(s), eps)
    p = torch._foreach_add(p, torch._foreach_div(torch._foreach_mul(g, _scalars(rates, p)), root))
    return _finished(old, (p, grads, s), found_inf)


def _decayed(p: Tensors, g: Tensors, lr: float | Tensor, decay: float, decoupled: bool) -> tuple[Tensors, Tensors]:
    """Parameters and gradients after weight decay: of the parameters if decoupled, else added to the gradients."""
    if decoupled:
        return _scaled(p, 1 - lr * decay), g
    return p, torch._foreach_add(g, p, alpha=decay)


FUSED_DECOMPOSITIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = MappingProxyType(
    {
        getattr(packet, overload): decomposition
        for packet, decomposition in (
            (aten._fused_sgd, _sgd),
            (aten._fused_adagrad, _adagrad),
            (aten._fused_adam, _adam(decoupled=False)),
            (aten._fused_adamw, _adam(decoupled=True)),
        )
        for overload in ("default", "tensor_lr")
    }
)
"""Decompositions of the functional fused optimizers; scalars passed as tensors are 0-d or have one element."""
