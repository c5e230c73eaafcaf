"""Replacements for torch functions that do not support all `torch.func` transforms, or choose other kernels in a trace.

Later random numbers depend on the strides of results, so these must be those of the kernels of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, maybe_get_level
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmd.tracing.result_strides import dense_strides, iteration_order


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot`; torch's reads the values of its argument under grad and jvp."""
    if num_classes < 0:
        return F.one_hot(tensor, num_classes)
    classes = torch.arange(num_classes, device=tensor.device)
    if not _transforms([tensor]):  # a lookup refuses classes that do not exist; under vmap torch accepts them, too
        tensor = classes.expand(*tensor.shape[:-1], num_classes).gather(-1, tensor)
    return (tensor.unsqueeze(-1) == classes).long().contiguous()


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention by fused kernels, unless a transform acts on the operands that these kernels do not support.

    They have no forward mode, no second derivative and no vmap rule. Elsewhere they are what torch calls: later random
    numbers depend on the strides of their results.
    """
    operands = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
    fused = _transforms(operands) in ([], [TransformType.Grad])
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def _max_pool1d(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`F.max_pool1d`; where no gradient is taken, torch has a kernel of its own, whose results are contiguous."""
    result = F.max_pool1d(x, *args, **kwargs)
    return result if isinstance(result, tuple) or _transforms([x]) else result.contiguous()


def _interpolate(
    x: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`F.interpolate`; its decomposition for nearest neighbours gives other strides than its kernels."""
    result = F.interpolate(x, size, scale_factor, mode, *args, **kwargs)
    return result.contiguous() if x.ndim == 3 and mode.startswith("nearest") else result


def _resize_as(x: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`x.resize_as_(other)`, which does nothing if the shapes are equal; in a trace it would change strides."""
    return x if x.shape == other.shape and not kwargs else x.resize_as_(other, **kwargs)


def _prod(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.prod`; its gradient has the strides of `gradient * (result / x)`, as torch's if no element is 0."""
    if _transforms([x]) != [TransformType.Grad]:
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
        if TransformType.Vmap not in _transforms([gradient]):  # there torch computes as this trace does
            order[:] = iteration_order(shape, [strides(gradient), dense_strides(shape, inner)])
        return gradient

    def leave(found: torch.Tensor) -> torch.Tensor:
        return found.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])

    result = torch.prod(_Identity.apply(x, leave), *args, **kwargs)  # type: ignore[no-untyped-call]
    inner = iteration_order(shape, [strides(result), x.stride()])
    return _Identity.apply(result, arrive)  # type: ignore[no-any-return, no-untyped-call]


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


def _transforms(tensors: Sequence[torch.Tensor]) -> list[TransformType]:
    """The transforms that act on one of the tensors, innermost first."""
    if not get_interpreter_stack():
        return []
    interpreter = retrieve_current_functorch_interpreter()
    wrapped = [tensor for tensor in tensors if maybe_get_level(tensor) == interpreter.level()]
    acts = any(_is_transformed(interpreter.key(), tensor) for tensor in wrapped)
    inner = [get_unwrapped(tensor) if maybe_get_level(tensor) == interpreter.level() else tensor for tensor in tensors]
    with interpreter.lower():
        return [interpreter.key()] * acts + _transforms(inner)


def _is_transformed(transform: TransformType, tensor: torch.Tensor) -> bool:
    """Whether the innermost transform acts on a tensor that it has wrapped."""
    if transform == TransformType.Grad:
        return tensor.requires_grad
    return transform != TransformType.Jvp or torch._VF._unpack_dual(tensor, level=0)[1] is not None  # type: ignore[attr-defined]


DIFFERENTIABLE: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        F.one_hot: _one_hot,
        F.scaled_dot_product_attention: _attention,
        F.max_pool1d: _max_pool1d,
        F.interpolate: _interpolate,
        torch.prod: _prod,
        torch.Tensor.prod: _prod,
        torch.Tensor.resize_as_: _resize_as,
        torch.resize_as_: _resize_as,
    }
)
"""The replacement for each torch function."""
