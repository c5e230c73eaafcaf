"""One primitive of a redistribution, as data that can be priced, lowered and run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor

from spmd.collectives.bytes_sent import chunk_lengths, max_bytes_sent
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.placement import Reduction
from spmd.core.spec import DTensorSpec
from spmd.ir.comm import Sent, StepKind


@attrs.frozen
class Step:
    """One primitive of a redistribution.

    Args:
        kind: the primitive.
        axes: the mesh axes that it works along, major first.
        source, target: the specs before and after. Specs between the steps of a sequence have no axes of size 1.
        dims: the tensor dims that it changes: `(dim,)`, or `(split_dim, concat_dim)` of an all_to_all; else empty.
        op: the reduction of an all_reduce, reduce_scatter or to_partial.
        dtype: the dtype in which it reduces; None for that of the tensor.
    """

    kind: StepKind
    axes: tuple[str, ...]
    source: DTensorSpec
    target: DTensorSpec
    dims: tuple[int, ...] = ()
    op: Reduction | None = None
    dtype: torch.dtype | None = None

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate."""
        return self.kind.is_collective

    @property
    def bytes(self) -> float:
        """The largest number of bytes that any rank sends, by the ring algorithm; 0 for a local step."""
        if self.kind is StepKind.PERMUTE:
            return float(self.source.local_bytes())  # some chunk moves, and all chunks are equal
        return _max_bytes_sent(self) if self.is_collective else 0.0

    @property
    def sent(self) -> Sent:
        """What a collective sends."""
        return self.kind, self.axes, self.bytes

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of what it sends."""
        return self.dtype or self.source.meta.dtype

    @property
    def primitive(self) -> torch._ops.OpOverload:
        """The operator, `torch.ops.spmd.<kind>.default`."""
        return getattr(torch.ops.spmd, self.kind).default

    def arguments(self, coordinate: Coordinate) -> tuple[Any, ...]:
        """The primitive's arguments after the tensor, for the rank at `coordinate`."""
        shape, axes = self.target.local_shape(coordinate), list(self.axes)
        if self.kind in (StepKind.ALL_REDUCE, StepKind.TO_PARTIAL):
            return (self.op, axes)
        if self.kind is StepKind.REDUCE_SCATTER:
            return (self.op, self.dims[0], shape[self.dims[0]], axes)
        if self.kind is StepKind.ALL_TO_ALL:
            split_dim, concat_dim = self.dims
            return (split_dim, concat_dim, shape[split_dim], shape[concat_dim], axes)
        if self.kind is StepKind.PERMUTE:
            sources = permutation_sources(self.source.mesh, self.axes, permuted_axes(self.source, self.target))
            return (list(sources), list(shape), axes)
        return (self.dims[0], shape[self.dims[0]], axes)

    def apply(self, x: Tensor, coordinate: Coordinate) -> Tensor:
        """Call the primitive on `x`, the shard under `source` of the rank at `coordinate`; returns the one of `target`.

        It has to be traced, or `x` a fake or meta tensor: with data, a runtime runs the primitive.
        """
        return self.primitive(x, *self.arguments(coordinate))

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join(self.axes)}]: {self.source.pspec!r} -> {self.target.pspec!r}"


@lru_cache(maxsize=65536)
def _max_bytes_sent(step: Step) -> float:
    """`Step.bytes` of a collective: the largest in any group.

    That is the group of coordinate zero, whose shards are largest; for an all_to_all of uneven chunks all are compared.
    """
    mesh = step.source.mesh
    zero, counts = (0,) * len(mesh.names), _sizes(mesh, step.axes)
    shape, itemsize = step.source.local_shape(zero), step.sent_dtype.itemsize
    if step.kind is not StepKind.ALL_TO_ALL:
        return max_bytes_sent(step.kind, counts, shape, itemsize, step.arguments(zero))
    split, concat = step.dims
    found = []
    for (before,), (after,) in itertools.product(_lengths(step.source, split), _lengths(step.target, concat)):
        held = tuple(before if dim == split else size for dim, size in enumerate(shape))
        found.append(max_bytes_sent(step.kind, counts, held, itemsize, (split, concat, 0, after)))
    return max(found)


def _lengths(spec: DTensorSpec, dim: int) -> frozenset[tuple[int, ...]]:
    """The distinct lengths of a dim in the shards of a spec."""
    return chunk_lengths((spec.meta.shape[dim],), _sizes(spec.mesh, spec.dims[dim]))


def _sizes(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    return tuple(mesh.axis_size(axis) for axis in axes)


Changes: TypeAlias = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""Axes before and after a permute, of each dim and of the parts of a pending reduction."""


def permuted_axes(source: DTensorSpec, target: DTensorSpec) -> Changes:
    """The axes that a permute changes: of each dim, and last the partial ones."""
    changes = [changed_axes(source.mesh, *pair) for pair in zip(source.dims, target.dims, strict=True)]
    before, after = (without_trivial(spec.mesh, [axis for axis, _ in spec.partial]) for spec in (source, target))
    parts = tuple(axis for axis in before if axis not in after), tuple(axis for axis in after if axis not in before)
    return (*changes, parts)


@lru_cache(maxsize=4096)
def permutation_sources(mesh: Mesh, axes: tuple[str, ...], changes: Changes) -> tuple[int, ...]:
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


def changed_axes(
    mesh: Mesh, before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of a dim before and after a step, without axes of size 1, a common prefix and a common suffix."""
    before, after = without_trivial(mesh, before), without_trivial(mesh, after)
    while before and after and before[0] == after[0]:
        before, after = before[1:], after[1:]
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return before, after


def without_trivial(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Mesh axes without those of size 1, along which nothing is split or reduced."""
    return tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
