"""all_to_all: a value sharded on one dim, resharded to another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Arguments, Collective
from spmd.collectives.primitives.chunks import chunk_lengths, row
from spmd.collectives.primitives.on_all_ranks import chunks_of
from spmd.collectives.step import Step, axis_sizes
from spmd.collectives.transport.exchange import Exchange, chunked, exchange_parts
from spmd.collectives.transport.flat_chunks import FlatChunks, resized
from spmd.collectives.transport.group import Group
from spmd.collectives.transport.process_groups import Member
from spmd.collectives.transport.transport_dtypes import moved
from spmd.core.spec import DTensorSpec, TensorMeta

_V = AxisType.VARYING


def _exchanged(split: int, concat: int, counts: tuple[int, ...]) -> int:
    """The most that a rank sends: its chunk of `concat`, times all of `split` but its own chunk."""
    return max(held * (split - kept) for held, kept in chunk_lengths((concat, split), counts))


def _step_bytes(step: Step) -> float:
    """The most bytes that any rank sends in a step; the groups of uneven chunks are compared."""
    zero = (0,) * len(step.source.mesh.names)
    shape, itemsize, (split, concat) = step.source.local_shape(zero), step.sent_dtype.itemsize, step.dims
    counts = axis_sizes(step.source.mesh, step.axes)
    found = []
    for (before,), (after,) in itertools.product(_lengths(step.source, split), _lengths(step.target, concat)):
        held = tuple(before if dim == split else size for dim, size in enumerate(shape))
        found.append(ALL_TO_ALL.most_bytes_sent(counts, held, itemsize, (split, concat, 0, after)))
    return max(found)


def _lengths(spec: DTensorSpec, dim: int) -> frozenset[tuple[int, ...]]:
    """The distinct lengths of a dim in the shards of a spec."""
    return chunk_lengths((spec.meta.shape[dim],), axis_sizes(spec.mesh, spec.dims[dim]))


def _sent(group: Group, calls: Sequence[Arguments], results: Sequence[Tensor]) -> list[int]:
    """What each rank holds of other ranks' chunks; argument 3 is the length of a rank's chunk."""

    def sent(rank: int) -> int:
        x, split_dim = calls[rank][:2]
        row = x.nbytes // x.shape[split_dim] if x.shape[split_dim] else 0
        return sum(row * chunk[3] for other, chunk in enumerate(calls) if other != rank)

    return list(map(sent, range(len(calls))))


def _run(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, split_dim, concat_dim, *_ = calls[0]
    # Concatenated and then split, which copies twice, but with n operators for n ranks instead of n * n.
    return chunks_of(group, torch.cat([arguments[0] for arguments in calls], concat_dim), split_dim)


def _exchange(
    member: Member, operand: TensorMeta, split_dim: int, concat_dim: int, split_size: int, concat_size: int
) -> Exchange:
    wire = moved(operand.dtype)
    sent = FlatChunks(member, operand.shape, split_dim)
    whole = resized(resized(operand.shape, split_dim, split_size), concat_dim, concat_size)
    received = FlatChunks(member, whole, concat_dim)
    return exchange_parts(
        member,
        wire,
        received.numels,
        sent.numels,
        chunked(wire, sent),
        lambda buffer: received.join(wire.decode(buffer)),
    )


ALL_TO_ALL = Collective(
    schema="all_to_all(Tensor x, int split_dim, int concat_dim, int split_size, int concat_size, str[] axes) -> Tensor",
    shape=lambda shape, split_dim, concat_dim, split_size, concat_size, axes: resized(
        resized(shape, split_dim, split_size), concat_dim, concat_size
    ),
    transpose=lambda g, shape, split_dim, concat_dim, split_size, concat_size, axes: torch.ops.spmd.all_to_all(
        g, concat_dim, split_dim, shape[concat_dim], shape[split_dim], axes
    ),
    batched=lambda n, split_dim, concat_dim, *rest: (split_dim + 1, concat_dim + 1, *rest),
    types=lambda *args: {_V: _V},
    arguments=lambda step, shape: (*step.dims, *(shape[dim] for dim in step.dims)),
    most_sent=lambda counts, shape, split, concat, _, length: (
        row(shape, split, concat) * _exchanged(shape[split], length, counts)
    ),
    step_bytes=_step_bytes,
    sent=_sent,
    copied=lambda ranks, buffer: 2 * buffer,
    run=_run,
    exchange=_exchange,
    alike=lambda split_dim, concat_dim, *sizes: (split_dim, concat_dim),
    example=lambda ranks, count: ((ranks, count // ranks), (0, 1, 1, count // ranks * ranks)),
)
"""A value sharded on `concat_dim`, resharded to `split_dim`: `split_size` is the length of this rank's chunk of
`split_dim` in the result, `concat_size` the global length of `concat_dim`."""
