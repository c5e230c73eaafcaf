"""Products in a trace, whose gradients are those of one device: torch's look at values, and in a trace they cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType

from spmd.tracing.active_transforms import active_transforms
from spmd.tracing.result_strides import dense_strides, iteration_order


def prod(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.prod`; its gradient has the strides of `gradient * (result / x)`, as torch's if no element is 0."""
    if active_transforms([x]) != [TransformType.Grad]:
        return torch.prod(x, *args, **kwargs)
    shape, order = x.shape, list(range(x.ndim))

    def strides(reduced: torch.Tensor) -> tuple[int, ...]:
        """The strides of the result or its gradient, broadcast to the shape of `x`."""
        if not reduced.ndim:
            return (0,) * x.ndim
        sizes, held = list(reduced.shape), list(reduced.stride())
        if len(sizes) < x.ndim:
            dim = (args[0] if args else kwargs["dim"]) % x.ndim
            sizes.insert(dim, 1)
            held.insert(dim, 0)
        return tuple(0 if own == 1 != size else stride for own, size, stride in zip(sizes, shape, held, strict=True))

    def arrive(gradient: torch.Tensor) -> torch.Tensor:
        if TransformType.Vmap not in active_transforms([gradient]):  # there torch computes as this trace does
            order[:] = iteration_order(shape, [strides(gradient), dense_strides(shape, inner)])
        return gradient

    def leave(found: torch.Tensor) -> torch.Tensor:
        return found.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])

    result = _dim_by_dim(_Identity.apply(x, leave), *args, **kwargs)  # type: ignore[no-untyped-call]
    inner = iteration_order(shape, [strides(result), x.stride()])
    return _Identity.apply(result, arrive)  # type: ignore[no-any-return, no-untyped-call]


def _dim_by_dim(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.prod`, over all dims one dim after the other: the gradient over one dim needs no flattened tensor."""
    if args or "dim" in kwargs or not x.ndim:
        return torch.prod(x, *args, **kwargs)
    for dim in reversed(range(x.ndim)):
        x = torch.prod(x, dim, **kwargs)
    return x


class _Identity(torch.autograd.Function):
    """The identity; its gradient is what a function makes of the gradient of its result."""

    @staticmethod
    def forward(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.change = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.change(gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, change: Any) -> Any:
        return x.view_as(x), in_dims[0]


def cumprod(x: torch.Tensor, dim: int, **kwargs: Any) -> torch.Tensor:
    """`torch.cumprod`; its first derivative is that of one device, not the sum for each element that torch traces."""
    if active_transforms([x]) != [TransformType.Grad] or not x.ndim or kwargs.keys() - {"dtype"}:
        return torch.cumprod(x, dim, **kwargs)
    return _Cumprod.apply(x.to(kwargs.get("dtype") or x.dtype), dim)  # type: ignore[no-any-return, no-untyped-call]


class _Cumprod(torch.autograd.Function):
    """`torch.cumprod`, once differentiable.

    The gradient divides by the elements before the first zero. Of those after it only the sums of the products up to
    the second zero matter, in the gradient of the first zero.
    """

    @staticmethod
    def forward(x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cumprod(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x, result), dim = ctx.saved_tensors, ctx.dim
        x, result = x.conj(), result.conj()
        is_zero = x == 0
        zeros = is_zero.cumsum(dim)
        before, first, between = zeros == 0, is_zero & (zeros == 1), ~is_zero & (zeros == 1)
        weighted = torch.where(before, result * gradient, 0)
        sums = weighted.flip(dim).cumsum(dim).flip(dim) / torch.where(is_zero, 1, x)
        products = torch.where(between, x, 1).cumprod(dim) * torch.where(zeros == 1, gradient, 0)
        of_first = products.sum(dim, True) * torch.where(before, x, 1).prod(dim, True)
        return torch.where(before, sums, torch.where(first, of_first, 0)), None
