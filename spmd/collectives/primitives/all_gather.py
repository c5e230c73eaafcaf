"""all_gather: the chunks that ranks hold, joined on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Arguments, Collective, Primitive, Shape
from spmd.collectives.primitives.chunks import all_but_the_smallest, row
from spmd.collectives.primitives.ring import gather_ring
from spmd.collectives.transport.exchange import Exchange, c10d, encoded, flat
from spmd.collectives.transport.flat_chunks import FlatChunks, pad, resized
from spmd.collectives.transport.group import Group
from spmd.collectives.transport.process_groups import Member
from spmd.collectives.transport.transport_dtypes import moved
from spmd.core.spec import TensorMeta
from spmd.errors import DivergenceError

_I, _V, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.REDUCED


def _run(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, dim, size, _ = calls[0]
    tensors = [arguments[0] for arguments in calls]
    found = [tensor.shape[dim] for tensor in tensors]
    if found != group.lengths(size):
        raise DivergenceError(f"all_gather: ranks hold {found} of dim {dim}, not the chunks of its length {size}.")
    return [torch.cat(tensors, dim).contiguous()] * len(calls)


def _exchange(member: Member, operand: TensorMeta, dim: int, size: int) -> Exchange:
    wire = moved(operand.dtype)
    pieces = FlatChunks(member, resized(operand.shape, dim, size), dim, padded=True)
    numel = pieces.numels[0]
    return Exchange(
        _gather,
        (member.group.size, member.name),
        encoded(wire) if numel == operand.numel else lambda x: wire.encode(pad(flat(x), numel)),
        lambda buffer: pieces.join(wire.decode(buffer)),
        sends=(numel * wire.factor,),
        receives=(numel * wire.factor,) * member.group.size,
    )


def _gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """All ranks' tensors, concatenated.

    Not by `all_gather_into_tensor`, which has a data race: gloo's threads write the name of the collective that each
    has finished, without a lock, to one string of the group (`ProcessGroupGloo::runLoop` in torch 2.13). The name for
    that operator, ALLGATHER_COALESCED, is the only one here that does not fit into the string object itself, so one
    thread may write to heap memory that another has freed.
    """
    return c10d.all_gather_into_tensor_out.default(x, ranks, group, out=x.new_empty(ranks * x.numel()))


def _whole(shape: Shape, dim: int, size: int, axes: Sequence[str]) -> Shape:
    return resized(shape, dim, size)


ALL_GATHER = Collective(
    schema="all_gather(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=_whole,
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.reduce_scatter(g, "sum", dim, shape[dim], axes),
    batched=lambda n, dim, size, axes: (dim + 1, size, axes),
    types=lambda *args: {_V: _V},
    arguments=lambda step, shape: (step.dims[0], shape[step.dims[0]]),
    most_sent=lambda counts, shape, dim, size: row(shape, dim) * all_but_the_smallest(size, counts),
    sent=lambda group, calls, results: gather_ring([arguments[0].nbytes for arguments in calls]),
    ring=lambda ranks, nbytes: (ranks - 1) * nbytes,
    copied=lambda ranks, buffer: buffer * (1 + 1 / ranks),
    run=_run,
    exchange=_exchange,
    alike=lambda dim, size: dim,
    fits=lambda shape, dim, size: (size, shape[:dim], shape[dim + 1 :]),
    gathers=True,
    is_invariant=True,
    example=lambda ranks, count: ((count // ranks,), (0, count // ranks * ranks)),
)
"""The chunks of `dim` that the ranks hold, joined; `size` is the length of `dim` in the result."""

ALL_GATHER_REDUCED = Primitive(
    "all_gather_reduced(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=_whole,
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.reduce_scatter_unreduced(
        g, "sum", dim, shape[dim], axes
    ),
    batched=ALL_GATHER.batched,
    types=lambda *args: {_V: _R},
    untyped=ALL_GATHER,
)
"""`all_gather` with a reduced result: its cotangent is summed over the ranks."""

ALL_GATHER_INVARIANT = Primitive(
    "all_gather_invariant(Tensor x, int dim, int size, str[] axes) -> Tensor",
    shape=_whole,
    transpose=lambda g, shape, dim, size, axes: torch.ops.spmd.shard(g, dim, shape[dim], axes),
    batched=ALL_GATHER.batched,
    types=lambda *args: {_V: _I},
    untyped=ALL_GATHER,
)
"""`all_gather` with a result that is typed as invariant; JAX's `all_gather_invariant`."""
