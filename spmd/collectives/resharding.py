"""Resharding: the cheapest sequence of primitives from one spec to another."""

from __future__ import annotations

import heapq
import itertools
from functools import lru_cache

import attrs
import torch

from spmd.collectives.moves import next_steps
from spmd.collectives.step import Step, without_trivial
from spmd.collectives.traffic import ring_bytes
from spmd.core.spec import DTensorSpec
from spmd.errors import ShardingError
from spmd.ir.comm import StepKind


@lru_cache(maxsize=65536)
def redistribution(
    source: DTensorSpec, target: DTensorSpec, reduce_dtype: torch.dtype | None = None
) -> tuple[Step, ...]:
    """The steps that take a value from one spec to another, with the fewest bytes sent per rank.

    A change along one axis is one step: Partial to Shard a reduce_scatter, Partial to Replicate an all_reduce, Shard to
    Replicate an all_gather, Shard to Shard an all_to_all; Replicate to Shard and to Partial are local. There are no
    steps between equal specs, or specs that differ only in axes of size 1. Sums run in `reduce_dtype`, as by
    `spmd.collectives.precision.summed_in`.

    Raises:
        ShardingError: specs of different meshes or metas.

    >>> import torch
    >>> from spmd.core.mesh import make_mesh
    >>> from spmd.core.spec import P, TensorMeta
    >>> mesh, meta = make_mesh({"x": 2}, runtime="virtual"), TensorMeta((4, 4), torch.float32)
    >>> partial = DTensorSpec.make(mesh, P(partial={"x": "sum"}), meta)
    >>> [str(step) for step in redistribution(partial, DTensorSpec.make(mesh, P("x"), meta))]
    ["reduce_scatter[x]: P(partial={'x': 'sum'}) -> P('x')"]
    """
    if source.mesh != target.mesh or source.meta != target.meta:
        raise ShardingError(
            f"Only the spec of a value can change, not its mesh, shape or dtype (got {source} on {source.mesh}, "
            f"expected {target.meta} on {target.mesh})."
        )
    start, goal = _without_trivial(source), _without_trivial(target)
    steps = _cheapest(start, goal, reduce_dtype)
    if steps:
        steps = (attrs.evolve(steps[0], source=source), *steps[1:])
        steps = (*steps[:-1], attrs.evolve(steps[-1], target=target))
    return steps


def _without_trivial(spec: DTensorSpec) -> DTensorSpec:
    """The spec without axes of size 1."""
    dims = tuple(without_trivial(spec.mesh, axes) for axes in spec.dims)
    partial = tuple((axis, op) for axis, op in spec.partial if spec.mesh.axis_size(axis) > 1)
    return attrs.evolve(spec, dims=dims, partial=partial)


def _cheapest(source: DTensorSpec, goal: DTensorSpec, reduce_dtype: torch.dtype | None) -> tuple[Step, ...]:
    """The steps that send the fewest bytes; among those, the fewest collectives, then steps.

    Dijkstra's algorithm over specs; ties are broken by the order in which `next_steps` lists steps.
    """
    counter = itertools.count()
    queue: list[tuple[tuple[float, int, int], int, DTensorSpec, tuple[Step, ...]]] = [((0.0, 0, 0), 0, source, ())]
    done: set[DTensorSpec] = set()
    while queue:
        (sent, collectives, count), _, here, path = heapq.heappop(queue)
        if here == goal:
            return path
        if here in done:
            continue
        done.add(here)
        for step in next_steps(here, goal, reduce_dtype):
            if step.target not in done:
                cost = (round(sent + _ring_bytes(step), 3), collectives + step.is_collective, count + 1)
                heapq.heappush(queue, (cost, next(counter), step.target, (*path, step)))
    raise ShardingError(
        f"No sequence of collectives leads from {source} to {goal} on {source.mesh}. Please report this."
    )


def _ring_bytes(step: Step) -> float:
    """The bytes that a rank sends, were all shards as large as the largest."""
    whole = step.target if step.kind is StepKind.ALL_GATHER else step.source
    size = whole.local_bytes() / whole.meta.dtype.itemsize * step.sent_dtype.itemsize
    return ring_bytes(step.kind, whole.mesh.axis_size(step.axes), size)
