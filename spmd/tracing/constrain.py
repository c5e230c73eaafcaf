"""`constrain` and `reshard`: set the sharding of a value inside a jitted function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from spmd.collectives.environment import bound_axes
from spmd.core.mesh import current_mesh
from spmd.core.placement import Replicate
from spmd.core.pytree import SpecLike, make_spec
from spmd.core.spec import P, TensorMeta
from spmd.core.spec_text import encode_spec, parse_spec
from spmd.errors import ShardingError
from spmd.job.tracebacks import hides_internals
from spmd.tracing.running import AsWritten, running
from spmd.tracing.source import where

T = TypeVar("T")


@hides_internals
def constrain(x: T, spec: SpecLike) -> T:
    """Fix the sharding of a value inside `jit`, as JAX's `with_sharding_constraint`.

    The cotangent of `x` is constrained to the same spec. The result shares no memory with `x`: writes in place to
    one do not reach the other. A DTensor outside of `jit` is redistributed.

    Args:
        x: a tensor inside a traced function, or a DTensor.
        spec: a `P`, or a tuple of placements, one for each axis of the mesh.

    Returns:
        The same tensor with this sharding.

    Raises:
        ShardingError: the spec does not fit the tensor or the mesh, or `x` is a plain tensor outside of `jit`.

    >>> from spmd import jit, make_mesh
    >>> mesh = make_mesh({"data": 2}, runtime="virtual")
    >>> f = jit(lambda x: constrain(x + 1, P()).sin(), P("data"), P("data"), mesh=mesh)
    >>> f.lower(torch.ones(4)).count()
    {'all_gather': 1}
    """
    return _apply(x, spec, "constrain")


@hides_internals
def reshard(x: T, spec: SpecLike) -> T:
    """Reshard a value inside `jit`; unlike with `constrain`, the sharding of its cotangent is not constrained.

    The arguments, the result and the errors are those of `constrain`.
    """
    return _apply(x, spec, "reshard")


def _apply(x: Any, spec: SpecLike, name: str) -> Any:
    if hasattr(x, "redistribute"):
        return x.redistribute(spec)
    if not isinstance(x, torch.Tensor):
        raise ShardingError(f"spmd.{name} takes a tensor (got {type(x).__name__}).")
    outer = running()
    if isinstance(outer, AsWritten):
        return x.clone()
    if outer is None:
        raise ShardingError(
            f"spmd.{name} was given a plain tensor {TensorMeta.of(x)} outside of spmd.jit. "
            "Call it inside a jitted function, or make a DTensor with spmd.distribute(x, spec)."
        )
    return _Constrained.apply(x, encode_spec(_fitting(x, spec, name)), name)


def _fitting(x: torch.Tensor, spec: SpecLike, name: str) -> P:
    """The spec as a P; ShardingError if it does not fit the tensor and the current mesh, or names a manual axis."""
    found = make_spec(current_mesh(), spec, TensorMeta.of(x), where=f"spmd.{name} at {where()}:")
    for axis in bound_axes():
        if found.placement(axis) != Replicate():
            raise ShardingError(
                f"spmd.{name} at {where()}: {found.pspec!r} names {axis!r}, which is manual in this shard_map body: a "
                "value is what one rank holds along it. Name other axes, or move it by a collective."
            )
    return found.pspec


@torch.library.custom_op("spmd::constrain", mutates_args=(), schema="(Tensor x, str spec) -> Tensor")
def _constrain(x: torch.Tensor, spec: str) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("spmd::reshard", mutates_args=(), schema="(Tensor x, str spec) -> Tensor")
def _reshard(x: torch.Tensor, spec: str) -> torch.Tensor:
    return x.clone()


@_constrain.register_fake
@_reshard.register_fake
def _same_shape(x: torch.Tensor, spec: str) -> torch.Tensor:
    return torch.empty_like(x)


def differentiable(op: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """The function with a derivative that calls an operator: of `constrain` and `reshard` another, else itself."""
    name = op._opname
    known = op in (torch.ops.spmd.constrain.default, torch.ops.spmd.reshard.default)
    return (lambda x, spec: _Constrained.apply(x, spec, name)) if known else op  # type: ignore[return-value]


# An autograd.Function, because the autograd rules of torch.library do not work under torch.func transforms.
class _Constrained(torch.autograd.Function):
    """The differentiable form of the operator `constrain` or `reshard`, which `name` selects."""

    @staticmethod
    def forward(x: torch.Tensor, spec: str, name: str) -> torch.Tensor:
        return getattr(torch.ops.spmd, name)(x, spec)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, str, str], output: torch.Tensor) -> None:
        ctx.spec, ctx.name = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad if ctx.name == "reshard" else _Constrained.apply(grad, ctx.spec, ctx.name), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:  # type: ignore[override]
        return _Constrained.apply(tangent, ctx.spec, ctx.name)  # type: ignore[no-any-return]

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: torch.Tensor, spec: str, name: str
    ) -> tuple[torch.Tensor, int]:
        return _Constrained.apply(x, _batched(spec, in_dims[0], x.ndim), name), in_dims[0]


def _batched(text: str, dim: int, ndim: int) -> str:
    """The spec under vmap: the mapped dim is inserted unsharded, the other dims keep their axes."""
    spec = parse_spec(text)
    dims = [*spec.dims, *((),) * (ndim - 1 - len(spec.dims))]
    return encode_spec(P(*dims[:dim], None, *dims[dim:], partial=dict(spec.partial)))
