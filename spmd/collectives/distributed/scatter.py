"""From the whole tensor of one rank to the shards of all ranks, without a copy of the whole on any other.

The ranks that differ from the source only along the axes that shard the tensor get their shards from it, in pieces;
then each of them broadcasts its shard along the other axes. So the source sends every element once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from spmd.collectives.transport.group import group_of
from spmd.collectives.transport.process_groups import process_group
from spmd.collectives.transport.transport_dtypes import moved
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec
from spmd.job import device_watch
from spmd.job.collective_scope import CollectiveScope

BUCKET = 1 << 24
"""The bytes of the buffer of a rank: what the source packs at once, for all ranks together."""


class Scatter:
    """Sends the tensors of one rank of a mesh, each rank its shard; beside their shards, ranks hold one bucket.

    Args:
        mesh: a distributed mesh.
        src_rank: the rank of the mesh that holds the tensors.
    """

    def __init__(self, mesh: Mesh, src_rank: int) -> None:
        (self._here,), self._source = mesh.held_coordinates, mesh.coordinate(src_rank)
        self._rank, self._source_rank = mesh.rank(self._here), src_rank
        self._mesh, self._process = mesh, mesh.ranks[src_rank]
        # One for all tensors, because the host's heap is not compacted.
        self._bucket = torch.empty(BUCKET, dtype=torch.uint8, device=mesh.device)

    def __call__(self, whole: Tensor, spec: DTensorSpec) -> Tensor:
        """The shard of this process's rank; a collective call of all ranks of the mesh.

        Args:
            whole: the global tensor, dense, on any device; only that of the source is read.
            spec: its spec. Along partial axes the ranks at index 0 get the values, and others the neutral element.
        """
        mesh, here = self._mesh, self._here
        shard = torch.empty(spec.local_shape(here), dtype=spec.meta.dtype, device=mesh.device)
        sharded = tuple(axis for axes in spec.dims for axis in axes)
        others = tuple(axis for axis in mesh.names if axis not in sharded)
        if self._source_rank in self._along(sharded):
            self._send(whole.detach(), shard, spec, sharded)
        self._broadcast(shard, others)
        if (neutral := spec.neutral_at(here)) is not None:
            shard.fill_(neutral)
        return shard

    def _send(self, whole: Tensor, shard: Tensor, spec: DTensorSpec, axes: tuple[str, ...]) -> None:
        """Write the shards of the ranks that differ from the source only along `axes`, of which this is one."""
        mesh, is_source = self._mesh, self._rank == self._source_rank
        if is_source:
            shard.copy_(whole[spec.local_slices(self._source)])
        ranks, wire = self._along(axes), moved(shard.dtype)
        if len(ranks) == 1:
            return
        ranks = tuple(sorted(ranks, key=mesh.ranks.__getitem__))  # as torch numbers processes
        scope, group = self._scope("scatter"), process_group(mesh, axes)
        largest = spec.local_shape((0,) * len(mesh.names))
        bucket = self._bucket.view(shard.dtype)
        for box in _boxes(largest, max(1, len(bucket) // len(ranks))):
            mine, size = shard[box], math.prod(part.stop - part.start for part in box)
            received, rows = bucket[:size], None
            if is_source:  # parts of equal size, as torch requires: smaller ones leave a rest
                rows = [bucket[number * size :][:size] for number in range(len(ranks))]
                for row, rank in zip(rows, ranks, strict=True):
                    part = whole[spec.local_slices(mesh.coordinate(rank))][box]
                    row[: part.numel()].view(part.shape).copy_(part)
                received = rows[ranks.index(self._rank)]
            with scope:
                sent = rows and [wire.encode(row) for row in rows]
                dist.scatter(wire.encode(received), sent, self._process, group=group)
            if received.is_cuda:
                device_watch.note(scope)
            if rows is None:
                mine.copy_(received[: mine.numel()].view(mine.shape))

    def _broadcast(self, shard: Tensor, axes: tuple[str, ...]) -> None:
        """Overwrite this rank's shard with that of the rank that has the source's indices along `axes`."""
        mesh, ranks = self._mesh, self._along(axes)
        if len(ranks) == 1 or not shard.numel():
            return
        holder = ranks[mesh.axis_index(self._source, axes)]
        scope, group = self._scope("broadcast"), process_group(mesh, axes)
        with scope:
            dist.broadcast(moved(shard.dtype).encode(shard.view(-1)), mesh.ranks[holder], group=group)
        if shard.is_cuda:
            device_watch.note(scope)

    def _along(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one only along `axes`, in the order of their index along these."""
        return group_of(self._mesh, axes, self._rank)[0].ranks

    def _scope(self, what: str) -> CollectiveScope:
        return CollectiveScope(f"the {what} of the tensors of rank {self._process}", self._mesh.ranks)


def _boxes(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Parts of a tensor of this shape that cover it once, each of at most so many elements.

    >>> [[(part.start, part.stop) for part in box] for box in _boxes((2, 5), 3)]
    [[(0, 1), (0, 3)], [(0, 1), (3, 5)], [(1, 2), (0, 3)], [(1, 2), (3, 5)]]
    """
    if not shape:
        yield ()
        return
    length, inner = shape[0], math.prod(shape[1:])
    step = max(1, min(length, most // max(inner, 1)))
    for start in range(0, length if inner else 0, step):
        for box in _boxes(shape[1:], most):
            yield (slice(start, min(start + step, length)), *box)
