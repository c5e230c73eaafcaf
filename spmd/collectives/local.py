"""The primitives that do not communicate, as functions of one rank; both runtimes run these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spmd.collectives.primitive import Local
from spmd.collectives.primitives import PRIMITIVES
from spmd.collectives.transport.group import Group, group_of
from spmd.core.mesh import Mesh
from spmd.core.spec import TensorMeta


def _axis_index(group: Group, index: int, device: torch.device) -> Local:
    return _number(index, device)


def _shard_offset(group: Group, index: int, device: torch.device, size: int) -> Local:
    return _number(group.bounds(size)[index][0], device)


def _number(value: int, device: torch.device) -> Local:
    """A number that a kernel of the device writes: one made on the host would be copied, which waits for a GPU.

    It is new at each call, for callers may write to it.
    """
    return lambda: torch.full((), value, dtype=torch.int64, device=device)


LOCALS: Mapping[torch._ops.OpOverload, Callable[..., Local]] = MappingProxyType(
    {
        **{primitive.op: primitive.local for primitive in PRIMITIVES if primitive.local is not None},
        torch.ops.spmd.axis_index.default: _axis_index,
        torch.ops.spmd.shard_offset.default: _shard_offset,
    }
)
"""For each primitive, what the rank with an index in a group runs on a device, for an operand and the other arguments
but the axes.
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
    return LOCALS[op](group, index, mesh.device, *given)


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
