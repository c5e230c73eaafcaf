"""The primitives on torch.distributed: what one rank does, by torch's own functional collectives.

`spmd.collectives.virtual` has the same primitives as functions over all ranks, and is the reference in tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives.local import LOCALS, Local
from spmd.collectives.primitives import UNTYPED
from spmd.collectives.transport.exchange import Exchange, c10d, chunked, encoded, exchange_parts, flat
from spmd.collectives.transport.flat_chunks import FlatChunks, pad, resized
from spmd.collectives.transport.process_groups import Member, member
from spmd.collectives.transport.ragged_exchange import RaggedExchange, stay
from spmd.collectives.transport.transport_dtypes import moved, reduced
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.placement import Reduction, combine
from spmd.core.spec import TensorMeta
from spmd.job.collective_scope import CollectiveScope


def bind(
    op: torch._ops.OpOverload,
    mesh: Mesh,
    coordinate: Coordinate,
    operand: TensorMeta | None,
    arguments: tuple[Any, ...],
    cause: str = "",
    *,
    communicates: bool = True,
) -> Exchange | RaggedExchange | Local:
    """The function that the rank at `coordinate` runs for one call of a primitive.

    Where the primitive communicates, this is a collective call: process groups are made at their first use. Without
    `communicates` it is none, and the function can pack and unpack only.

    Args:
        op: a primitive, `torch.ops.spmd.<name>.default`.
        mesh: a distributed mesh.
        coordinate: the coordinate of this process's rank.
        operand: local shape and dtype of the operand; None for a primitive without one.
        arguments: the arguments after the tensors.
        cause: why it is called, and where in the user's code, for messages.

    Returns:
        A function of the tensors of the call; an `Exchange` or a `RaggedExchange` if ranks communicate. Both raise a
        SpmdError if a rank is missing.

    Raises:
        SpmdError: a rank is missing when process groups are made.
    """
    op = UNTYPED.get(op, op)
    *rest, axes = arguments
    place = member(mesh, tuple(axes), coordinate, communicates=communicates and op in _EXCHANGES)
    if op in LOCALS:
        operands = [] if operand is None else [operand]
        return LOCALS[op](place.group, place.index, mesh.device, *operands, *rest)
    assert operand is not None
    if place.group.size == 1:
        return _alone(op, place, rest)
    kind = op._schema.name.removeprefix("spmd::")
    what = f"{kind} over {', '.join(axes)}{cause and f' ({cause})'}"
    scope = CollectiveScope(what, place.processes, mesh.ranks)
    return attrs.evolve(_EXCHANGES[op](place, operand, *rest), scope=scope)


def run(op: torch._ops.OpOverload, mesh: Mesh, coordinate: Coordinate, x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Run one primitive on this rank's tensor; a collective call of all ranks of its group."""
    call: Callable[..., Tensor] = bind(op, mesh, coordinate, TensorMeta.of(x), arguments)
    return call(x)


def _all_reduce(place: Member, operand: TensorMeta, op: str) -> Exchange:
    wire, shape = reduced(operand.dtype, op), operand.shape
    sizes = (operand.numel * wire.factor,)
    return Exchange(
        c10d.all_reduce.default,
        (op, place.name),
        encoded(wire),
        lambda buffer: wire.decode(buffer).view(shape),
        sends=sizes,
        receives=sizes,
        in_place=c10d.all_reduce_.default,
    )


def _all_gather(place: Member, operand: TensorMeta, dim: int, size: int) -> Exchange:
    wire = moved(operand.dtype)
    pieces = FlatChunks(place, resized(operand.shape, dim, size), dim, padded=True)
    numel = pieces.numels[0]
    return Exchange(
        _gather,
        (place.group.size, place.name),
        encoded(wire) if numel == operand.numel else lambda x: wire.encode(pad(flat(x), numel)),
        lambda buffer: pieces.join(wire.decode(buffer)),
        sends=(numel * wire.factor,),
        receives=(numel * wire.factor,) * place.group.size,
    )


def _gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """All ranks' tensors, concatenated.

    Not by `all_gather_into_tensor`, which has a data race: gloo's threads write the name of the collective that each
    has finished, without a lock, to one string of the group (`ProcessGroupGloo::runLoop` in torch 2.13). The name for
    that operator, ALLGATHER_COALESCED, is the only one here that does not fit into the string object itself, so one
    thread may write to heap memory that another has freed.
    """
    return c10d.all_gather_into_tensor_out.default(x, ranks, group, out=x.new_empty(ranks * x.numel()))


def _reduce_scatter(place: Member, operand: TensorMeta, op: Reduction, dim: int, size: int) -> Exchange:
    if is_sent_in_parts(place.device, place.group.size):
        return _reduce_parts(place, operand, op, dim)
    wire = reduced(operand.dtype, op)
    pieces = FlatChunks(place, operand.shape, dim, padded=True)
    shape = pieces.piece_shape(place.index)
    numel = math.prod(shape)
    sizes = tuple(numel * wire.factor for numel in pieces.numels)
    return Exchange(
        c10d.reduce_scatter_tensor.default,
        (op, place.group.size, place.name),
        chunked(wire, pieces),
        lambda buffer: wire.decode(buffer).view(-1)[:numel].view(shape),
        sends=sizes,
        receives=sizes[:1],
    )


_MOST_PARTS = 16
"""The ranks of a group up to which a reduce_scatter is an all_to_all: it connects each rank with each."""


def is_sent_in_parts(device: str, ranks: int) -> bool:
    """Whether a reduce_scatter among so many ranks, on devices of this type, is sent as an all_to_all."""
    return device == "cpu" and ranks <= _MOST_PARTS


def _reduce_parts(place: Member, operand: TensorMeta, op: Reduction, dim: int) -> Exchange:
    """A reduce_scatter as an all_to_all, whose parts each rank reduces in rank order, as virtual ranks do.

    Gloo has none: torch's function reduces the whole on all ranks, and takes twice the time and the bytes.
    """
    wire, ranks = moved(operand.dtype), place.group.size
    pieces = FlatChunks(place, operand.shape, dim)
    shape = pieces.piece_shape(place.index)
    numel = math.prod(shape)

    def reduce(buffer: Tensor) -> Tensor:
        parts = wire.decode(buffer).view(ranks, numel)
        first, second, *others = (parts[number] for number in place.places)
        found = combine(op, first, second)
        for part in others:
            combine(op, found, part, out=found)
        return found.view(shape)

    return exchange_parts(place, wire, [numel] * ranks, pieces.numels, chunked(wire, pieces), reduce)


def _all_to_all(
    place: Member, operand: TensorMeta, split_dim: int, concat_dim: int, split_size: int, concat_size: int
) -> Exchange:
    wire = moved(operand.dtype)
    sent = FlatChunks(place, operand.shape, split_dim)
    received = FlatChunks(
        place, resized(resized(operand.shape, split_dim, split_size), concat_dim, concat_size), concat_dim
    )
    return exchange_parts(
        place,
        wire,
        received.numels,
        sent.numels,
        chunked(wire, sent),
        lambda buffer: received.join(wire.decode(buffer)),
    )


def _permute(place: Member, operand: TensorMeta, sources: list[int], shape: list[int]) -> Exchange:
    """An all_to_all in which each rank sends to one rank at most, and receives from one at most."""
    wire, source = moved(operand.dtype), sources[place.index]
    sent, received = [0] * place.group.size, [0] * place.group.size
    if place.index in sources:
        sent[place.places[sources.index(place.index)]] = operand.numel
    if source >= 0:
        received[place.places[source]] = math.prod(shape)
    numel = sum(sent)
    return exchange_parts(
        place,
        wire,
        received,
        sent,
        lambda x: wire.encode(flat(x)[:numel]),
        lambda buffer: wire.decode(buffer).view(shape) if source >= 0 else buffer.new_zeros(shape, dtype=operand.dtype),
    )


_EXCHANGES: Mapping[torch._ops.OpOverload, Callable[..., Exchange | RaggedExchange]] = MappingProxyType(
    {
        torch.ops.spmd.all_reduce.default: _all_reduce,
        torch.ops.spmd.all_gather.default: _all_gather,
        torch.ops.spmd.reduce_scatter.default: _reduce_scatter,
        torch.ops.spmd.all_to_all.default: _all_to_all,
        torch.ops.spmd.permute.default: _permute,
        torch.ops.spmd.ragged_all_to_all.default: RaggedExchange.of,
    }
)


def _alone(op: torch._ops.OpOverload, place: Member, rest: list[Any]) -> Local:
    """A collective in a group of one rank, which does not communicate."""
    if op is torch.ops.spmd.permute.default and rest[0] == [-1]:
        return lambda x: x.new_zeros(rest[1])
    if op is torch.ops.spmd.ragged_all_to_all.default:
        return functools.partial(stay, place, *rest)
    return lambda x: x.contiguous()
