"""The primitives on one tensor that do not communicate: casts of types, shards of what ranks hold alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Local, Primitive, Shape
from spmd.collectives.transport.flat_chunks import resized
from spmd.collectives.transport.group import Group
from spmd.core.placement import neutral_element
from spmd.core.spec import TensorMeta

_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED


def _pcast_transpose(g: Tensor, shape: Shape, source: str, to: str, axes: Sequence[str]) -> Tensor:
    if source == _I:
        op = torch.ops.spmd.all_reduce if to == _V else torch.ops.spmd.all_reduce_unreduced
        return op(g, "sum", axes)  # type: ignore[no-any-return]
    return torch.ops.spmd.pcast(g, AxisType(to).of_cotangent, AxisType(source).of_cotangent, axes)  # type: ignore[no-any-return]


def _shard(group: Group, index: int, device: torch.device, operand: TensorMeta, dim: int, size: int) -> Local:
    start, stop = group.bounds(operand.shape[dim])[index]
    return lambda x: x.narrow(dim, start, stop - start).contiguous()


def _to_partial(group: Group, index: int, device: torch.device, operand: TensorMeta, op: str) -> Local:
    if index == 0:
        return lambda x: x.contiguous()
    neutral = neutral_element(op, operand.dtype)  # type: ignore[arg-type]
    return lambda x: torch.full_like(x, neutral, memory_format=torch.contiguous_format)


PCAST = Primitive(
    "pcast(Tensor x, str source, str to, str[] axes) -> Tensor",
    shape=lambda shape, source, to, axes: shape,
    transpose=_pcast_transpose,
    types=lambda source, to, axes: {AxisType(source): AxisType(to)},
    local=lambda *args: lambda x: x,
)
"""x unchanged, of another type: invariant to varying or reduced, varying to unreduced, reduced to varying."""

SHARD = Primitive(
    "shard(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: resized(shape, dim, size),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.all_gather_invariant(g, dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
    types=lambda *args: {_I: _V},
    arguments=lambda step, shape: (step.dims[0], shape[step.dims[0]]),
    local=_shard,
)
"""This rank's chunk of `dim`, of length `size`, of a value that is the same on all ranks. No communication."""

TO_PARTIAL = Primitive(
    "to_partial(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: torch.ops.spmd.to_partial(g, "sum", axes),
    is_linear=lambda op, axes: op == "sum",
    jvp=lambda t, x, result, op, axes: torch.ops.spmd.to_partial(t, "sum", axes),
    vjp=lambda g, x, result, op, axes: torch.ops.spmd.to_partial(g, "sum", axes),
    types=lambda *args: {_V: _U, _R: _V},
    arguments=lambda step, shape: (step.op,),
    local=_to_partial,
)
"""x on the rank at index 0, the neutral element of `op` on the others. No communication."""
