"""The collective primitives: torch operators in namespace `spmd`, each with the rules that transforms need.

All sizes that a primitive depends on are arguments, so the shape of its result follows from them, and tracing needs no
mesh. A runtime runs the primitives; a call outside of one is an error. Several axes act as one, the first one major.
Shards of a dim are the nested chunks of `spmd.core.spec.chunk_bounds`, possibly uneven or empty.

Differentiation follows JAX's `shard_map`: along each mesh axis a value has a type (`spmd.collectives.axis_types`). The
cotangent of an invariant or a varying value is of the same type, that of an unreduced value is reduced, and that of a
reduced one unreduced. Each primitive states its types and its transpose.

| primitive                | operand   | result    | transpose                   |
|--------------------------|-----------|-----------|-----------------------------|
| all_reduce (sum)         | varying   | invariant | pcast to varying            |
| pcast to varying         | invariant | varying   | all_reduce                  |
| all_gather               | varying   | varying   | reduce_scatter              |
| all_gather_invariant     | varying   | invariant | shard                       |
| all_gather_reduced       | varying   | reduced   | reduce_scatter_unreduced    |
| reduce_scatter (sum)     | varying   | varying   | all_gather                  |
| reduce_scatter_unreduced | unreduced | varying   | all_gather_reduced          |
| all_reduce_unreduced     | unreduced | invariant | pcast to reduced            |
| pcast to reduced         | invariant | reduced   | all_reduce_unreduced        |
| pcast to unreduced       | varying   | unreduced | pcast of reduced to varying |
| pcast to varying         | reduced   | varying   | pcast to unreduced          |
| all_to_all               | varying   | varying   | all_to_all                  |
| permute                  | varying   | varying   | permute                     |
| ragged_all_to_all        | varying   | varying   | ragged_all_to_all           |
| shard                    | invariant | varying   | all_gather_invariant        |
| to_partial               | varying   | unreduced | to_partial                  |
| to_partial               | reduced   | varying   | to_partial                  |

The gradient of an all_reduce by max or min is divided equally among the elements that equal the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Primitive, Shape, register, register_primitive
from spmd.ir.comm import StepKind
from spmd.ir.effects import Effect, declare_effect
from spmd.ir.simplify import declare_identity


def _resized(shape: Shape, *changes: tuple[int, int]) -> Shape:
    """`shape` with other lengths of some dims; `changes` are pairs of dim and length."""
    lengths = dict(changes)
    return tuple(lengths.get(dim, length) for dim, length in enumerate(shape))


_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED


def _to_varying(x: Tensor, axes: Sequence[str]) -> Tensor:
    return torch.ops.spmd.pcast(x, _I, _V, axes)  # type: ignore[no-any-return]


def _attained(x: Tensor, result: Tensor, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Where x equals the extremum over all ranks, and on how many ranks it does."""
    mask = x == _to_varying(result, axes)
    count = torch.ops.spmd.all_reduce(mask.to(result.dtype), "sum", axes)
    return mask, count.clamp(min=1)


def _extremum_vjp(g: Tensor, x: Tensor, result: Tensor, op: str, axes: Sequence[str]) -> Tensor:
    mask, count = _attained(x, result, axes)
    return torch.where(mask, _to_varying(g / count, axes), 0)


def _extremum_jvp(t: Tensor, x: Tensor, result: Tensor, op: str, axes: Sequence[str]) -> Tensor:
    mask, count = _attained(x, result, axes)
    return torch.ops.spmd.all_reduce(torch.where(mask, t, 0), "sum", axes) / count


ALL_REDUCE = Primitive(
    "all_reduce(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: _to_varying(g, axes),
    is_linear=lambda op, axes: op == "sum",
    jvp=_extremum_jvp,
    vjp=_extremum_vjp,
    types=lambda *args: {_V: _I},
)
"""The elementwise reduction (`op`: sum, max or min) of what the ranks hold, on every rank."""

ALL_REDUCE_UNREDUCED = Primitive(
    "all_reduce_unreduced(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: torch.ops.spmd.pcast(g, _I, _R, axes),
    types=lambda *args: {_U: _I},
)
"""`all_reduce` by sum of an unreduced value."""


def _pcast_transpose(g: Tensor, shape: Shape, source: str, to: str, axes: Sequence[str]) -> Tensor:
    if source == _I:
        op = torch.ops.spmd.all_reduce if to == _V else torch.ops.spmd.all_reduce_unreduced
        return op(g, "sum", axes)  # type: ignore[no-any-return]
    return torch.ops.spmd.pcast(g, AxisType(to).of_cotangent, AxisType(source).of_cotangent, axes)  # type: ignore[no-any-return]


PCAST = Primitive(
    "pcast(Tensor x, str source, str to, str[] axes) -> Tensor",
    shape=lambda shape, source, to, axes: shape,
    transpose=_pcast_transpose,
    types=lambda source, to, axes: {AxisType(source): AxisType(to)},
)
"""x unchanged, of another type: invariant to varying or reduced, varying to unreduced, reduced to varying."""

ALL_GATHER = Primitive(
    "all_gather(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.reduce_scatter(g, "sum", dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
    types=lambda *args: {_V: _V},
)
"""The chunks of `dim` that the ranks hold, joined; `size` is the length of `dim` in the result."""

REDUCE_SCATTER = Primitive(
    "reduce_scatter(Tensor x, str op, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, op, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, op, dim, size, axes: torch.ops.spmd.all_gather(g, dim, shape[dim], axes),
    batched=lambda n, op, dim, size, axes: (op, dim + 1, size, axes),
    is_linear=lambda op, dim, size, axes: op == "sum",
    types=lambda *args: {_V: _V},
)
"""This rank's chunk of `dim`, of length `size`, of the elementwise reduction of what the ranks hold."""

ALL_GATHER_REDUCED = Primitive(
    "all_gather_reduced(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.reduce_scatter_unreduced(
        g, "sum", dim, shape[dim], axes
    ),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
    types=lambda *args: {_V: _R},
)
"""`all_gather` with a reduced result: its cotangent is summed over the ranks."""

REDUCE_SCATTER_UNREDUCED = Primitive(
    "reduce_scatter_unreduced(Tensor x, str op, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, op, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, op, dim, size, axes: torch.ops.spmd.all_gather_reduced(g, dim, shape[dim], axes),
    batched=lambda n, op, dim, size, axes: (op, dim + 1, size, axes),
    types=lambda *args: {_U: _V},
)
"""`reduce_scatter` by sum of an unreduced value."""

ALL_TO_ALL = Primitive(
    "all_to_all(Tensor x, int split_dim, int concat_dim, int split_size, int concat_size, str[] axes) -> Tensor",
    shape=lambda shape, split_dim, concat_dim, split_size, concat_size, axes: _resized(
        shape, (split_dim, split_size), (concat_dim, concat_size)
    ),
    transpose=lambda g, shape, split_dim, concat_dim, split_size, concat_size, axes: torch.ops.spmd.all_to_all(
        g, concat_dim, split_dim, shape[concat_dim], shape[split_dim], axes
    ),
    batched=lambda n, split_dim, concat_dim, *rest: (split_dim + 1, concat_dim + 1, *rest),
    types=lambda *args: {_V: _V},
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
    types=lambda *args: {_V: _V},
)
"""The rank at index i receives x of the rank at index `sources[i]`, or zeros if that is -1; sources are unique."""


def _batched_ragged(info: Any, in_dims: Any, x: Tensor, table: Tensor, *args: Any) -> tuple[Tensor, int]:
    """Rows of all elements of a batch are sent together if they go the same way, else one element after the other."""
    op = torch.ops.spmd.ragged_all_to_all
    if in_dims[1] is None:
        return op(x.movedim(in_dims[0], 1), table, *args), 1
    xs = [x] * info.batch_size if in_dims[0] is None else x.unbind(in_dims[0])
    return torch.stack([op(*pair, *args) for pair in zip(xs, table.unbind(in_dims[1]), strict=True)]), 0


RAGGED_ALL_TO_ALL = Primitive(
    "ragged_all_to_all(Tensor x, Tensor table, int size, bool transposed, str[] axes) -> Tensor",
    shape=lambda shape, table, size, transposed, axes: (size, *shape[1:]),
    transpose=lambda g, shape, table, size, transposed, axes: torch.ops.spmd.ragged_all_to_all(
        g, table, shape[0], not transposed, axes
    ),
    vmap=_batched_ragged,
    types=lambda *args: {_V: _V},
)
"""Rows of x sent to places in a tensor of `size` rows, as `transport.routes` reads from `table`, which all ranks
hold; rows that nothing is sent to are zero. With `transposed`, every row goes the other way."""

SHARD = Primitive(
    "shard(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.all_gather_invariant(g, dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
    types=lambda *args: {_I: _V},
)
"""This rank's chunk of `dim`, of length `size`, of a value that is the same on all ranks. No communication."""

ALL_GATHER_INVARIANT = Primitive(
    "all_gather_invariant(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=lambda shape, dim, size, axes: _resized(shape, (dim, size)),
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.shard(g, dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
    types=lambda *args: {_V: _I},
)
"""`all_gather` with a result that is typed as invariant; JAX's `all_gather_invariant`."""

TO_PARTIAL = Primitive(
    "to_partial(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: torch.ops.spmd.to_partial(g, "sum", axes),
    is_linear=lambda op, axes: op == "sum",
    jvp=lambda t, x, result, op, axes: torch.ops.spmd.to_partial(t, "sum", axes),
    vjp=lambda g, x, result, op, axes: torch.ops.spmd.to_partial(g, "sum", axes),
    types=lambda *args: {_V: _U, _R: _V},
)
"""x on the rank at index 0, the neutral element of `op` on the others. No communication."""

PRIMITIVES: tuple[Primitive, ...] = (
    ALL_REDUCE, PCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE, SHARD, ALL_GATHER_INVARIANT, TO_PARTIAL,
    ALL_REDUCE_UNREDUCED, ALL_GATHER_REDUCED, REDUCE_SCATTER_UNREDUCED, RAGGED_ALL_TO_ALL,
)  # fmt: skip


INDEX_SCHEMAS: tuple[str, ...] = (
    "axis_index(str[] axes) -> Tensor",
    "shard_offset(int size, str[] axes) -> Tensor",
)
"""Primitives without a tensor argument: this rank's index along the axes, and the start of its chunk of a dim of length
`size`. Results are 0-d int64 tensors on the mesh's device; in a trace, where no mesh is known, on the CPU, which torch
combines with tensors of any device."""


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

BY_OPERATOR: Mapping[torch._ops.OpOverload, Primitive] = MappingProxyType(
    {primitive.op: primitive for primitive in PRIMITIVES}
)
"""The primitive of each operator."""

UNTYPED: Mapping[torch._ops.OpOverload, torch._ops.OpOverload] = MappingProxyType(
    {
        ALL_GATHER_INVARIANT.op: ALL_GATHER.op,
        ALL_GATHER_REDUCED.op: ALL_GATHER.op,
        ALL_REDUCE_UNREDUCED.op: ALL_REDUCE.op,
        REDUCE_SCATTER_UNREDUCED.op: REDUCE_SCATTER.op,
    }
)
"""The operators that differ from others in the types of their results only, which no rank sees."""

_KINDS = {
    ALL_REDUCE.op: StepKind.ALL_REDUCE,
    ALL_GATHER.op: StepKind.ALL_GATHER,
    REDUCE_SCATTER.op: StepKind.REDUCE_SCATTER,
    ALL_TO_ALL.op: StepKind.ALL_TO_ALL,
    PERMUTE.op: StepKind.PERMUTE,
    RAGGED_ALL_TO_ALL.op: StepKind.ALL_TO_ALL,
}

COLLECTIVES: Mapping[torch._ops.OpOverload, StepKind] = MappingProxyType(
    {**_KINDS, **{op: _KINDS[plain] for op, plain in UNTYPED.items()}}
)
"""The primitives that communicate, each with its kind."""

for _op in COLLECTIVES:
    declare_effect(_op, Effect.COLLECTIVE)
declare_identity(torch.ops.spmd.pcast.default)
