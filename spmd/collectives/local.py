"""The primitives that do not communicate, as functions of one rank; both runtimes run these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spmd.collectives import primitives as _primitives  # noqa: F401  (defines torch.ops.spmd)
from spmd.collectives.group import Group, group_of
from spmd.core.mesh import Mesh
from spmd.core.placement import neutral_element
from spmd.core.spec import TensorMeta

Local: TypeAlias = Callable[..., Tensor]
"""One call of such a primitive on one rank: a function of its operand, if it has one."""


def _shard(group: Group, index: int, operand: TensorMeta, dim: int, size: int) -> Local:
    start, stop = group.bounds(operand.shape[dim])[index]
    return lambda x: x.narrow(dim, start, stop - start).contiguous()


def _to_partial(group: Group, index: int, operand: TensorMeta, op: str) -> Local:
    if index == 0:
        return lambda x: x.contiguous()
    neutral = neutral_element(op, operand.dtype)  # type: ignore[arg-type]
    return lambda x: torch.full_like(x, neutral, memory_format=torch.contiguous_format)


def _constant(value: int) -> Local:
    return lambda: torch.tensor(value)


LOCALS: Mapping[torch._ops.OpOverload, Callable[..., Local]] = MappingProxyType(
    {
        torch.ops.spmd.pcast.default: lambda group, index, operand, source, to: lambda x: x,
        torch.ops.spmd.shard.default: _shard,
        torch.ops.spmd.to_partial.default: _to_partial,
        torch.ops.spmd.axis_index.default: lambda group, index: _constant(index),
        torch.ops.spmd.shard_offset.default: lambda group, index, size: _constant(group.bounds(size)[index][0]),
    }
)
"""For each primitive, what the rank with an index in a group runs for an operand and the other arguments but the axes.
"""


def bind_local(op: torch._ops.OpOverload, mesh: Mesh, rank: int, *args: Any) -> Local:
    """One call of a primitive on one rank as a function of its operand, if it has one.

    Args:
        op: a primitive in `LOCALS`.
        mesh: the mesh.
        rank: the rank's number.
        args: the arguments of the call, with the meta of the operand.
    """
    *given, axes = args
    group, index = group_of(mesh, tuple(axes), rank)
    return LOCALS[op](group, index, *given)


def run_local(op: torch._ops.OpOverload, mesh: Mesh, rank: int, *args: Any) -> Tensor:
    """Run one call of a primitive on one rank; arguments as those of `bind_local`, with the operand itself.

    >>> from spmd.core.mesh import make_mesh
    >>> mesh = make_mesh({"x": 2}, runtime="virtual")
    >>> run_local(torch.ops.spmd.shard.default, mesh, 1, torch.arange(4), 0, 2, ["x"])
    tensor([2, 3])
    """
    operands = [arg for arg in args if isinstance(arg, Tensor)]
    metas = (TensorMeta.of(arg) if isinstance(arg, Tensor) else arg for arg in args)
    return bind_local(op, mesh, rank, *metas)(*operands)
