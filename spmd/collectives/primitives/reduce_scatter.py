"""reduce_scatter: a rank's chunk of the elementwise reduction of what ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Arguments, Collective, Primitive, Shape
from spmd.collectives.primitives.chunks import all_but_the_smallest, row
from spmd.collectives.primitives.on_all_ranks import chunks_of, reduced_calls
from spmd.collectives.primitives.ring import scatter_ring
from spmd.collectives.transport.exchange import Exchange, c10d, chunked, exchange_parts
from spmd.collectives.transport.flat_chunks import FlatChunks, resized
from spmd.collectives.transport.group import Group
from spmd.collectives.transport.process_groups import Member
from spmd.collectives.transport.transport_dtypes import moved, reduced
from spmd.core.placement import Reduction, combine
from spmd.core.spec import TensorMeta

_V, _U = AxisType.VARYING, AxisType.UNREDUCED

_MOST_PARTS = 16
"""The ranks of a group up to which a reduce_scatter is an all_to_all: it connects each rank with each."""


def _in_parts(device: str, ranks: int) -> bool:
    """Whether it is sent as an all_to_all, among so many ranks on devices of this type."""
    return device == "cpu" and ranks <= _MOST_PARTS


def _run(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, op, dim, _, _ = calls[0]
    return chunks_of(group, reduced_calls(op, calls), dim)


def _exchange(member: Member, operand: TensorMeta, op: Reduction, dim: int, size: int) -> Exchange:
    if _in_parts(member.device, member.group.size):
        return _reduce_parts(member, operand, op, dim)
    wire = reduced(operand.dtype, op)
    pieces = FlatChunks(member, operand.shape, dim, padded=True)
    shape = pieces.piece_shape(member.index)
    numel = math.prod(shape)
    sizes = tuple(numel * wire.factor for numel in pieces.numels)
    return Exchange(
        c10d.reduce_scatter_tensor.default,
        (op, member.group.size, member.name),
        chunked(wire, pieces),
        lambda buffer: wire.decode(buffer).view(-1)[:numel].view(shape),
        sends=sizes,
        receives=sizes[:1],
    )


def _reduce_parts(member: Member, operand: TensorMeta, op: Reduction, dim: int) -> Exchange:
    """A reduce_scatter as an all_to_all, whose parts each rank reduces in rank order, as virtual ranks do.

    Gloo has none: torch's function reduces the whole on all ranks, and takes twice the time and the bytes.
    """
    wire, ranks = moved(operand.dtype), member.group.size
    pieces = FlatChunks(member, operand.shape, dim)
    shape = pieces.piece_shape(member.index)
    numel = math.prod(shape)

    def reduce(buffer: Tensor) -> Tensor:
        parts = wire.decode(buffer).view(ranks, numel)
        first, second, *others = (parts[number] for number in member.places)
        found = combine(op, first, second)
        for part in others:
            combine(op, found, part, out=found)
        return found.view(shape)

    return exchange_parts(member, wire, [numel] * ranks, pieces.numels, chunked(wire, pieces), reduce)


def _chunk(shape: Shape, op: str, dim: int, size: int, axes: Sequence[str]) -> Shape:
    return resized(shape, dim, size)


REDUCE_SCATTER = Collective(
    schema="reduce_scatter(Tensor x, str op, int dim, int size, str[] axes) -> Tensor",
    shape=_chunk,
    transpose=lambda g, shape, op, dim, size, axes: torch.ops.spmd.all_gather(g, dim, shape[dim], axes),
    batched=lambda n, op, dim, size, axes: (op, dim + 1, size, axes),
    is_linear=lambda op, dim, size, axes: op == "sum",
    types=lambda *args: {_V: _V},
    arguments=lambda step, shape: (step.op, step.dims[0], shape[step.dims[0]]),
    most_sent=lambda counts, shape, op, dim, *_: row(shape, dim) * all_but_the_smallest(shape[dim], counts),
    sent=lambda group, calls, results: scatter_ring([result.nbytes for result in results]),
    run=_run,
    exchange=_exchange,
    alike=lambda op, dim, size: (op, dim),
    reduction=lambda op, dim, size: op,
    measured_results=True,
    in_parts=_in_parts,
    example=lambda ranks, count: ((count,), ("sum", 0, -(-count // ranks))),
)
"""This rank's chunk of `dim`, of length `size`, of the elementwise reduction of what the ranks hold."""

REDUCE_SCATTER_UNREDUCED = Primitive(
    "reduce_scatter_unreduced(Tensor x, str op, int dim, int size, str[] axes) -> Tensor",
    shape=_chunk,
    transpose=lambda g, shape, op, dim, size, axes: torch.ops.spmd.all_gather_reduced(g, dim, shape[dim], axes),
    batched=REDUCE_SCATTER.batched,
    types=lambda *args: {_U: _V},
    untyped=REDUCE_SCATTER,
)
"""`reduce_scatter` by sum of an unreduced value."""
