"""All primitives: their operators, and which of them communicate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.collectives.primitive import Collective, Primitive, register, register_primitive
from spmd.collectives.primitives.all_gather import ALL_GATHER, ALL_GATHER_INVARIANT, ALL_GATHER_REDUCED
from spmd.collectives.primitives.all_reduce import ALL_REDUCE, ALL_REDUCE_UNREDUCED
from spmd.collectives.primitives.all_to_all import ALL_TO_ALL
from spmd.collectives.primitives.permute import PERMUTE
from spmd.collectives.primitives.ragged_all_to_all import RAGGED_ALL_TO_ALL
from spmd.collectives.primitives.reduce_scatter import REDUCE_SCATTER, REDUCE_SCATTER_UNREDUCED
from spmd.collectives.primitives.without_communication import PCAST, SHARD, TO_PARTIAL
from spmd.ir.effects import Effect, declare_effect
from spmd.ir.simplify import declare_identity

_COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE, RAGGED_ALL_TO_ALL)

PRIMITIVES: tuple[Primitive, ...] = (
    *_COLLECTIVES, ALL_GATHER_INVARIANT, ALL_GATHER_REDUCED, ALL_REDUCE_UNREDUCED, REDUCE_SCATTER_UNREDUCED,
    PCAST, SHARD, TO_PARTIAL,
)  # fmt: skip

INDEX_SCHEMAS: tuple[str, ...] = (
    "axis_index(str[] axes) -> Tensor",
    "shard_offset(int size, str[] axes) -> Tensor",
)
"""Primitives without a tensor argument: this rank's index along the axes, and the start of its chunk of a dim of length
`size`. Results are 0-d int64 tensors on the mesh's device; in a trace, where no mesh is known, on the CPU, which torch
combines with tensors of any device."""

# torch registers operators once per process, so they are defined when this module is first imported.
for _primitive in PRIMITIVES:
    register_primitive(_primitive)
for _schema in INDEX_SCHEMAS:
    register(_schema, lambda *args: torch.empty((), dtype=torch.int64))

BY_OPERATOR: Mapping[torch._ops.OpOverload, Primitive] = MappingProxyType(
    {primitive.op: primitive for primitive in PRIMITIVES}
)
"""The primitive of each operator."""

UNTYPED: Mapping[torch._ops.OpOverload, torch._ops.OpOverload] = MappingProxyType(
    {primitive.op: primitive.untyped.op for primitive in PRIMITIVES if primitive.untyped}
)
"""The operators that differ from others in the types of their results only, which no rank sees."""

COLLECTIVES: Mapping[torch._ops.OpOverload, Collective] = MappingProxyType(
    {op: run for op, one in BY_OPERATOR.items() if isinstance(run := one.untyped or one, Collective)}
)
"""For each operator that communicates, the collective that ranks run."""

KINDS: Mapping[str, Collective] = MappingProxyType({one.name: one for one in _COLLECTIVES if one.counts_as is None})
"""The kinds of collectives that plans have, by name."""

for _op in COLLECTIVES:
    declare_effect(_op, Effect.COLLECTIVE)
declare_identity(PCAST.op)
