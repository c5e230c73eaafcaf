"""permute: each rank receives the tensor of one other, or zeros."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Arguments, Collective, Local, Shape
from spmd.collectives.step import Step, without_trivial
from spmd.collectives.transport.exchange import Exchange, exchange_parts, flat
from spmd.collectives.transport.group import Group
from spmd.collectives.transport.process_groups import Member
from spmd.collectives.transport.transport_dtypes import moved
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, TensorMeta

_V = AxisType.VARYING


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


Changes: TypeAlias = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""Axes before and after a permute, of each dim and of the parts of a pending reduction."""


def permuted_axes(source: DTensorSpec, target: DTensorSpec) -> Changes:
    """The axes that a permute changes: of each dim, and last the partial ones."""
    changes = [_changed_axes(source.mesh, *pair) for pair in zip(source.dims, target.dims, strict=True)]
    before, after = (without_trivial(spec.mesh, [axis for axis, _ in spec.partial]) for spec in (source, target))
    parts = tuple(axis for axis in before if axis not in after), tuple(axis for axis in after if axis not in before)
    return (*changes, parts)


@lru_cache(maxsize=4096)
def _permutation_sources(mesh: Mesh, axes: tuple[str, ...], changes: Changes) -> tuple[int, ...]:
    """The `sources` of a permute: for each index along `axes`, the index of a rank that holds the chunk it needs.

    No rank sends to two others, and one that already holds its chunk keeps it. Before and after, the axes must split
    the tensor into the same chunks, of as many parts.
    """
    indices = list(itertools.product(*(range(mesh.axis_size(axis)) for axis in axes)))

    def piece(index: tuple[int, ...], side: int) -> tuple[int, ...]:
        coordinate = dict(zip(axes, index, strict=True))
        return tuple(_flat_index(mesh, coordinate, change[side]) for change in changes)

    held = [piece(index, 0) for index in indices]
    wanted = [piece(index, 1) for index in indices]
    senders: dict[tuple[int, ...], list[int]] = {}
    for rank, have in enumerate(held):
        if have != wanted[rank]:
            senders.setdefault(have, []).append(rank)
    return tuple(rank if held[rank] == want else senders[want].pop(0) for rank, want in enumerate(wanted))


def _flat_index(mesh: Mesh, coordinate: dict[str, int], axes: tuple[str, ...]) -> int:
    index = 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + coordinate[axis]
    return index


def _changed_axes(
    mesh: Mesh, before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of a dim before and after a step, without axes of size 1, a common prefix and a common suffix."""
    before, after = without_trivial(mesh, before), without_trivial(mesh, after)
    while before and after and before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return before, after


def _arguments(step: Step, shape: Shape) -> tuple[Any, ...]:
    changes = permuted_axes(step.source, step.target)
    return list(_permutation_sources(step.source.mesh, step.axes, changes)), list(shape)


def _most_sent(counts: tuple[int, ...], shape: Shape, sources: Sequence[int], *_: Any) -> int:
    is_sent = any(source not in (-1, target) for target, source in enumerate(sources))
    return math.prod(shape) * is_sent


def _sent(group: Group, calls: Sequence[Arguments], results: Sequence[Tensor]) -> list[int]:
    sources = list(calls[0][1])
    tensors = [arguments[0] for arguments in calls]
    return [x.nbytes * sum(source == rank != to for to, source in enumerate(sources)) for rank, x in enumerate(tensors)]


def _run(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    results = []
    for index, (x, sources, shape, _) in enumerate(calls):
        source = sources[index]
        results.append(calls[source][0].contiguous() if source >= 0 else x.new_zeros(shape))
    return results


def _exchange(member: Member, operand: TensorMeta, sources: list[int], shape: list[int]) -> Exchange:
    """An all_to_all in which each rank sends to one rank at most, and receives from one at most."""
    wire, source = moved(operand.dtype), sources[member.index]
    sent, received = [0] * member.group.size, [0] * member.group.size
    if member.index in sources:
        sent[member.places[sources.index(member.index)]] = operand.numel
    if source >= 0:
        received[member.places[source]] = math.prod(shape)
    numel = sum(sent)
    return exchange_parts(
        member,
        wire,
        received,
        sent,
        lambda x: wire.encode(flat(x)[:numel]),
        lambda buffer: wire.decode(buffer).view(shape) if source >= 0 else buffer.new_zeros(shape, dtype=operand.dtype),
    )


def _alone(member: Member, sources: list[int], shape: list[int]) -> Local:
    return (lambda x: x.new_zeros(shape)) if sources == [-1] else Tensor.contiguous


def _busiest(indices: Sequence[int], sources: Sequence[int], shape: Sequence[int]) -> tuple[Any, ...]:
    """The permutation in which the first of some ranks sends if any of them does, and receives so, too."""
    first, found = indices[0], [-1] * len(sources)
    other = (first + 1) % len(sources)
    if any(rank in sources for rank in indices):
        found[other] = first
    if any(sources[rank] >= 0 for rank in indices):
        found[first] = other
    return found, shape


PERMUTE = Collective(
    schema="permute(Tensor x, int[] sources, int[] shape, str[] axes) -> Tensor",
    shape=lambda shape, sources, result_shape, axes: tuple(result_shape),
    transpose=lambda g, shape, sources, result_shape, axes: torch.ops.spmd.permute(
        g, inverse_permutation(sources), list(shape), axes
    ),
    batched=lambda n, sources, result_shape, axes: (sources, [n, *result_shape], axes),
    types=lambda *args: {_V: _V},
    arguments=_arguments,
    most_sent=_most_sent,
    step_bytes=lambda step: float(step.source.local_bytes()),  # some chunk moves, and all chunks are equal
    sent=_sent,
    ring=lambda ranks, nbytes: nbytes,
    run=_run,
    exchange=_exchange,
    alone=_alone,
    is_identity=lambda sources, shape: sources != [-1],
    alike=lambda sources, shape: sources,
    joins=False,
    busiest=_busiest,
    example=lambda ranks, count: ((count,), ([(n + 1) % ranks for n in range(ranks)], [count])),
)
"""The rank at index i receives x of the rank at index `sources[i]`, or zeros if that is -1; sources are unique."""
