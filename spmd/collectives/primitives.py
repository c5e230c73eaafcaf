"""The collective primitives: torch operators in namespace `spmd`, each with the rules that transforms need.

All sizes that a primitive depends on are arguments, so the shape of its result follows from them, and tracing needs no
mesh. A runtime runs the primitives; a call outside of one is an error. Several axes act as one, the first one major.
Shards of a dim are the nested chunks of `spmd.core.spec.chunk_bounds`, possibly uneven or empty.

Differentiation follows JAX's `shard_map` with varying types. A value is *invariant* over a mesh axis if it is the same
on all ranks along it, else *varying*. The cotangent of an invariant value is invariant. `pcast` makes a varying value
of an invariant one, and its transpose is a sum over the ranks; `all_reduce` of sums is the reverse.

| primitive            | operand   | result    | transpose            |
|----------------------|-----------|-----------|----------------------|
| all_reduce (sum)     | varying   | invariant | pcast                |
| pcast                | invariant | varying   | all_reduce           |
| all_gather           | varying   | varying   | reduce_scatter       |
| reduce_scatter (sum) | varying   | varying   | all_gather           |
| all_to_all           | varying   | varying   | all_to_all           |
| permute              | varying   | varying   | permute              |
| shard                | invariant | varying   | all_gather_invariant |
| all_gather_invariant | varying   | invariant | shard                |
| to_partial           | varying   | varying   | to_partial           |

The gradient of an all_reduce by max or min is divided equally among the elements that equal the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from spmd.collectives.primitive import Primitive, Shape, register, register_primitive
from spmd.ir.comm import StepKind
from spmd.ir.effects import Effect, declare_effect
from spmd.ir.simplify import declare_identity


def _resized(shape: Shape, *changes: tuple[int, int]) -> Shape:
    """`shape` with other lengths of some dims; `changes` are pairs of dim and length."""
    lengths = dict(changes)
    return tuple(lengths.get(dim, length) for dim, length in enumerate(shape))


def _attained(x: Tensor, result: Tensor, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Where x equals the extremum over all ranks, and on how many ranks it does."""
    mask = x == result
    count = torch.ops.spmd.all_reduce(mask.to(result.dtype), "sum", axes)
    return mask, count.clamp(min=1)


def _extremum_vjp(g: Tensor, x: Tensor, result: Tensor, op: str, axes: Sequence[str]) -> Tensor:
    mask, count = _attained(x, result, axes)
    return torch.where(mask, torch.ops.spmd.pcast(g / count, axes), 0)


def _extremum_jvp(t: Tensor, x: Tensor, result: Tensor, op: str, axes: Sequence[str]) -> Tensor:
    mask, count = _attained(x, result, axes)
    return torch.ops.spmd.all_reduce(torch.where(mask, t, 0), "sum", axes) / count


ALL_REDUCE = Primitive(
    "all_reduce(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: torch.ops.spmd.pcast(g, axes),
    is_linear=lambda op, axes: op == "sum",
    jvp=_extremum_jvp,
    vjp=_extremum_vjp,
)
"""The elementwise reduction (`op`: sum, max or min) of what the ranks hold, on every rank."""

PCAST = Primitive(
    "pcast(Tensor x, str[] axes) -> Tensor",
    shape=lambda shape, axes: shape,
    transpose=lambda g, shape, axes: torch.ops.spmd.all_reduce(g, "sum", axes),
)
"""x unchanged: an invariant value as a varying one."""

ALL_GATHER = Primitive(
    "all_gather(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.reduce_scatter(g, "sum", dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
)
"""The chunks of `dim` that the ranks hold, joined; `size` is the length of `dim` in the result."""

REDUCE_SCATTER = Primitive(
    "reduce_scatter(Tensor x, str op, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, op, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, op, dim, size, axes: torch.ops.spmd.all_gather(g, dim, shape[dim], axes),
    batched=lambda n, op, dim, size, axes: (op, dim + 1, size, axes),
    is_linear=lambda op, dim, size, axes: op == "sum",
)
"""This rank's chunk of `dim`, of length `size`, of the elementwise reduction of what the ranks hold."""

ALL_TO_ALL = Primitive(
    "all_to_all(Tensor x, int split_dim, int concat_dim, int split_size, int concat_size, str[] axes) -> Tensor",
    shape=lambda shape, split_dim, concat_dim, split_size, concat_size, axes: _resized(
        shape, (split_dim, split_size), (concat_dim, concat_size)
    ),
    transpose=lambda g, shape, split_dim, concat_dim, split_size, concat_size, axes: torch.ops.spmd.all_to_all(
        g, concat_dim, split_dim, shape[concat_dim], shape[split_dim], axes
    ),
    batched=lambda n, split_dim, concat_dim, *rest: (split_dim + 1, concat_dim + 1, *rest),
)
"""A value sharded on `concat_dim`, resharded to `split_dim`: `split_size` is the length of this rank's chunk of
`split_dim` in the result, `concat_size` the global length of `concat_dim`."""

PERMUTE = Primitive(
    "permute(Tensor x, int[] sources, int[] shape, str[] axes) -> Tensor",
    shape=lambda shape, sources, result_shape, axes: tuple(result_shape),
    transpose=lambda g, shape, sources, result_shape, axes: torch.ops.spmd.permute(
        g, inverse_permutation(sources), list(shape), axes
    ),
    batched=lambda n, sources, result_shape, axes: (sources, [n, *result_shape], axes),
)
"""The rank at index i receives x of the rank at index `sources[i]`, or zeros if that is -1; sources are unique."""

SHARD = Primitive(
    "shard(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.all_gather_invariant(g, dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
)
"""This rank's chunk of `dim`, of length `size`, of a value that is the same on all ranks. No communication."""

ALL_GATHER_INVARIANT = Primitive(
    "all_gather_invariant(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.shard(g, dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
)
"""`all_gather` with a result that is typed as invariant; JAX's `all_gather_invariant`."""

TO_PARTIAL = Primitive(
    "to_partial(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: torch.ops.spmd.to_partial(g, "sum", axes),
    is_linear=lambda op, axes: op == "sum",
    jvp=lambda t, x, result, op, axes: torch.ops.spmd.to_partial(t, "sum", axes),
    vjp=lambda g, x, result, op, axes: torch.ops.spmd.to_partial(g, "sum", axes),
)
"""x on the rank at index 0, the neutral element of `op` on the others. No communication."""

PRIMITIVES: tuple[Primitive, ...] = (
    ALL_REDUCE, PCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE, SHARD, ALL_GATHER_INVARIANT, TO_PARTIAL,
)  # fmt: skip

INDEX_SCHEMAS: tuple[str, ...] = (
    "axis_index(str[] axes) -> Tensor",
    "shard_offset(int size, str[] axes) -> Tensor",
)
"""Primitives without a tensor argument: this rank's index along the axes, and the start of its chunk of a dim of length
`size`. Results are 0-d int64 tensors on the CPU, which torch combines with tensors of any device."""


def inverse_permutation(sources: Sequence[int]) -> list[int]:
    """The `sources` of the inverse permutation, which sends every value back.

    >>> inverse_permutation([2, -1, 1])
    [-1, 2, 0]
    """
    inverse = [-1] * len(sources)
    for index, source in enumerate(sources):
        if source >= 0:
            inverse[source] = index
    return inverse


# torch registers operators once per process, so they are defined when this module is first imported.
for _primitive in PRIMITIVES:
    register_primitive(_primitive)
for _schema in INDEX_SCHEMAS:
    register(_schema, lambda *args: torch.empty((), dtype=torch.int64))

COLLECTIVES: Mapping[torch._ops.OpOverload, StepKind] = MappingProxyType(
    {
        torch.ops.spmd.all_reduce.default: StepKind.ALL_REDUCE,
        torch.ops.spmd.all_gather.default: StepKind.ALL_GATHER,
        torch.ops.spmd.all_gather_invariant.default: StepKind.ALL_GATHER,
        torch.ops.spmd.reduce_scatter.default: StepKind.REDUCE_SCATTER,
        torch.ops.spmd.all_to_all.default: StepKind.ALL_TO_ALL,
        torch.ops.spmd.permute.default: StepKind.PERMUTE,
    }
)
"""The primitives that communicate, each with its kind."""

for _op in COLLECTIVES:
    declare_effect(_op, Effect.COLLECTIVE)
declare_identity(torch.ops.spmd.pcast.default)
