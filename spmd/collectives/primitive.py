"""How primitives are defined: operators in namespace `spmd` that can be traced, differentiated and batched.

A runtime runs them: calling one directly, outside of a trace, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function

from spmd.collectives.axis_types import AxisType
from spmd.errors import SpmdError

Shape: TypeAlias = tuple[int, ...]

_LIBRARY = torch.library.Library("spmd", "FRAGMENT")


@attrs.frozen(eq=False)
class Primitive:
    """A primitive on one tensor `x`: its schema and the rules of transforms, where `*args` are the other arguments.

    Tensors among the other arguments are integers, so they have no gradients.

    Args:
        schema: name and arguments, as torch.library defines operators; the first argument is `Tensor x`.
        shape: `shape(x.shape, *args)`: the shape of the result.
        transpose: `transpose(g, x.shape, *args)`: the cotangent of x for a cotangent `g` of the result.
        batched: `batched(n, *args)`: the other arguments for an x with a new leading dim of length n, under vmap.
        vmap: `vmap(info, in_dims, x, *args)`: the rule for vmap as torch.library takes it, where `batched` does not do.
        is_linear: `is_linear(*args)`: whether the call is a linear function of x.
        jvp, vjp: `(t, x, result, *args)`: the tangent of the result for a tangent `t` of x, and the cotangent of x for
            a cotangent of the result; used where the call is not linear.
        types: `types(*args)`: the type of the result for each possible type of x, along the axes of the call.
    """

    schema: str
    shape: Callable[..., Shape]
    transpose: Callable[..., Tensor]
    types: Callable[..., Mapping[AxisType, AxisType]]
    batched: Callable[..., tuple[Any, ...]] = lambda n, *args: args
    is_linear: Callable[..., bool] = lambda *args: True
    jvp: Callable[..., Tensor] | None = None
    vjp: Callable[..., Tensor] | None = None
    vmap: Callable[..., tuple[Tensor, int]] | None = None

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
            ctx.shape, ctx.is_linear, ctx.forward_grad = tuple(x.shape), primitive.is_linear(*args), forward_grad
            ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
            saved = [] if ctx.is_linear else [x, result]
            saved += [arg for arg in args if isinstance(arg, Tensor)]
            ctx.save_for_backward(*saved)
            ctx.save_for_forward(*saved)
            ctx.positions = [position for position, arg in enumerate(args) if isinstance(arg, Tensor)]
            if not result.is_floating_point() and not result.is_complex():
                ctx.mark_non_differentiable(result)
            return result

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            values, args = _saved(ctx)
            if ctx.is_linear:
                cotangent = primitive.transpose(g, ctx.shape, *args)
            else:
                cotangent = _nonlinear(primitive.vjp, primitive)(g, *values, *args)
            return (None, None, cotangent, *(None for _ in args))

        @staticmethod
        def jvp(ctx: Any, _: None, __: None, t: Tensor, *___: None) -> Tensor:
            values, args = _saved(ctx)
            # As in `forward`: a Function's jvp runs without tangents, and an outer level has some of `t`.
            with torch.autograd.forward_ad._set_fwd_grad_enabled(ctx.forward_grad):
                if ctx.is_linear:
                    return primitive.op(t, *args)
                return _nonlinear(primitive.jvp, primitive)(t, *values, *args)

    def kernel(keyset: Any, x: Tensor, *args: Any) -> Tensor:
        with enable_single_level_autograd_function():
            modes = (torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled())
            return Derivative.apply(modes, keyset, x, *args)  # type: ignore[attr-defined]

    return kernel


def _saved(ctx: Any) -> tuple[Sequence[Tensor], list[Any]]:
    """What a call saved: x and the result if it is not linear, and its other arguments."""
    args, count = list(ctx.args), len(ctx.saved_tensors) - len(ctx.positions)
    for position, tensor in zip(ctx.positions, ctx.saved_tensors[count:], strict=True):
        args[position] = tensor
    return ctx.saved_tensors[:count], args


def _nonlinear(rule: Callable[..., Tensor] | None, primitive: Primitive) -> Callable[..., Tensor]:
    if rule is None:
        raise SpmdError(f"spmd::{primitive.name} can be differentiated for op='sum' only. Reduce first, then shard.")
    return rule


def register(
    schema: str,
    fake: Callable[..., Tensor],
    *,
    kernel: Callable[..., Tensor] | None = None,
    autograd: Callable[..., Tensor] | None = None,
    batch: Callable[..., tuple[Any, Any]] | None = None,
) -> str:
    """Define an operator that can be traced.

    Args:
        schema: name and arguments, as torch.library defines operators.
        fake: the result on fake tensors.
        kernel: what a call outside of a runtime does; by default it raises.
        autograd: the autograd kernel, which takes the set of dispatch keys first.
        batch: the rule for vmap, as `torch.library.register_vmap` takes it.

    Returns:
        The qualified name, `spmd::<name>`.
    """
    name = f"spmd::{schema.partition('(')[0]}"

    def call(*args: Any) -> Tensor:
        raise SpmdError(f"{name} was called outside of a runtime. Use collectives inside spmd.shard_map or spmd.jit.")

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel or call, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=_LIBRARY)
    if autograd is not None:
        _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    if batch is not None:
        torch.library.register_vmap(name, batch, lib=_LIBRARY)
    return name


def register_primitive(primitive: Primitive) -> None:
    """Define the operator of a primitive, with its fake, autograd and vmap rules."""

    def fake(x: Tensor, *args: Any) -> Tensor:
        return x.new_empty(primitive.shape(tuple(x.shape), *args))

    def batch(info: Any, in_dims: Any, x: Tensor, *args: Any) -> tuple[Tensor, int]:
        return primitive.op(x.movedim(in_dims[0], 0), *primitive.batched(info.batch_size, *args)), 0

    register(primitive.schema, fake, autograd=_derive(primitive), batch=primitive.vmap or batch)
