"""How primitives are defined: operators in namespace `spmd` that can be traced, differentiated and batched.

A runtime runs them: calling one directly, outside of a trace, is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function

from spmd.errors import SpmdError

Shape: TypeAlias = tuple[int, ...]

_LIBRARY = torch.library.Library("spmd", "FRAGMENT")


@attrs.frozen(eq=False)
class Primitive:
    """A primitive on one tensor `x`: its schema and the rules of transforms, where `*args` are the other arguments.

    Args:
        schema: name and arguments, as torch.library defines operators; the first argument is `Tensor x`.
        shape: `shape(x.shape, *args)`: the shape of the result.
        transpose: `transpose(g, x.shape, *args)`: the cotangent of x for a cotangent `g` of the result.
        batched: `batched(n, *args)`: the other arguments for an x with a new leading dim of length n, under vmap.
        is_linear: `is_linear(*args)`: whether the call is a linear function of x.
        jvp, vjp: `(t, x, result, *args)`: the tangent of the result for a tangent `t` of x, and the cotangent of x for
            a cotangent of the result; used where the call is not linear.
    """

    schema: str
    shape: Callable[..., Shape]
    transpose: Callable[..., Tensor]
    batched: Callable[..., tuple[Any, ...]] = lambda n, *args: args
    is_linear: Callable[..., bool] = lambda *args: True
    jvp: Callable[..., Tensor] | None = None
    vjp: Callable[..., Tensor] | None = None

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def op(self) -> torch._ops.OpOverload:
        """The operator, `torch.ops.spmd.<name>.default`."""
        return getattr(torch.ops.spmd, self.name).default


def _derive(primitive: Primitive) -> Callable[..., Tensor]:
    """The autograd kernel: one level of differentiation, in forward and reverse mode, around the operator itself.

    torch.library.register_autograd has reverse mode only. A single-level Function is what the dispatcher expects below
    torch.func's interpreters, which call this kernel once per level.
    """

    class Derivative(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, modes: tuple[bool, bool], keyset: Any, x: Tensor, *args: Any) -> Tensor:
            # A Function's forward runs without gradients; outer levels must record the call, so modes are restored.
            grad, forward_grad = modes
            with (
                torch._C._AutoDispatchBelowAutograd(),
                torch.set_grad_enabled(grad),
                torch.autograd.forward_ad._set_fwd_grad_enabled(forward_grad),
            ):
                result = primitive.op.redispatch(keyset & torch._C._after_autograd_keyset, x, *args)
            ctx.shape, ctx.args, ctx.is_linear = tuple(x.shape), args, primitive.is_linear(*args)
            if not ctx.is_linear:
                ctx.save_for_backward(x, result)
                ctx.save_for_forward(x, result)
            if not result.is_floating_point() and not result.is_complex():
                ctx.mark_non_differentiable(result)
            return result

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            if ctx.is_linear:
                cotangent = primitive.transpose(g, ctx.shape, *ctx.args)
            else:
                cotangent = _nonlinear(primitive.vjp, primitive)(g, *ctx.saved_tensors, *ctx.args)
            return (None, None, cotangent, *(None for _ in ctx.args))

        @staticmethod
        def jvp(ctx: Any, _: None, __: None, t: Tensor, *___: None) -> Tensor:
            if ctx.is_linear:
                return primitive.op(t, *ctx.args)
            return _nonlinear(primitive.jvp, primitive)(t, *ctx.saved_tensors, *ctx.args)

    def kernel(keyset: Any, x: Tensor, *args: Any) -> Tensor:
        with enable_single_level_autograd_function():
            modes = (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
            return Derivative.apply(modes, keyset, x, *args)  # type: ignore[attr-defined]

    return kernel


def _nonlinear(rule: Callable[..., Tensor] | None, primitive: Primitive) -> Callable[..., Tensor]:
    if rule is None:
        raise SpmdError(f"spmd::{primitive.name} can be differentiated for op='sum' only. Reduce first, then shard.")
    return rule


def register(schema: str, fake: Callable[..., Tensor]) -> str:
    """Define an operator that can be traced but not called.

    Args:
        schema: name and arguments, as torch.library defines operators.
        fake: the result on fake tensors.

    Returns:
        The qualified name, `spmd::<name>`.
    """
    name = f"spmd::{schema.partition('(')[0]}"

    def call(*args: Any) -> Tensor:
        raise SpmdError(f"{name} was called outside of a runtime. Use collectives inside spmd.shard_map or spmd.jit.")

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, call, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    return name


def register_primitive(primitive: Primitive) -> None:
    """Define the operator of a primitive, with its fake, autograd and vmap rules."""

    def fake(x: Tensor, *args: Any) -> Tensor:
        return x.new_empty(primitive.shape(tuple(x.shape), *args))

    def batch(info: Any, in_dims: Any, x: Tensor, *args: Any) -> tuple[Tensor, int]:
        return primitive.op(x.movedim(in_dims[0], 0), *primitive.batched(info.batch_size, *args)), 0

    name = register(primitive.schema, fake)
    _LIBRARY.impl(name, _derive(primitive), "Autograd", with_keyset=True)
    torch.library.register_vmap(name, batch, lib=_LIBRARY)
