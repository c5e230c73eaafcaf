"""Resharding: the cheapest sequence of primitives from one spec to another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import attrs
import torch

from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.cheapest import Ways, eager_cost
from spmd.collectives.primitives import SHARD
from spmd.collectives.step import Step, without_trivial
from spmd.core.spec import Dims, DTensorSpec
from spmd.errors import ShardingError


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
    _check(source, target)
    return _joined(source, target, _cheapest(_without_trivial(source), _without_trivial(target), reduce_dtype))


def _check(source: DTensorSpec, target: DTensorSpec) -> None:
    if source.mesh != target.mesh or source.meta != target.meta:
        raise ShardingError(
            f"Only the spec of a value can change, not its mesh, shape or dtype (got {source} on {source.mesh}, "
            f"expected {target.meta} on {target.mesh})."
        )


def _joined(source: DTensorSpec, target: DTensorSpec, steps: tuple[Any, ...]) -> tuple[Any, ...]:
    """Steps between specs without axes of size 1, as steps between the given ones."""
    if steps:
        steps = (attrs.evolve(steps[0], source=source), *steps[1:])
        steps = (*steps[:-1], attrs.evolve(steps[-1], target=target))
    return steps


def _without_trivial(spec: DTensorSpec) -> DTensorSpec:
    """The spec without axes of size 1."""
    dims = tuple(without_trivial(spec.mesh, axes) for axes in spec.dims)
    partial = tuple((axis, op) for axis, op in spec.partial if spec.mesh.axis_size(axis) > 1)
    return attrs.evolve(spec, dims=dims, partial=partial)


@lru_cache(maxsize=65536)
def only_slices(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Test for a redistribution without communication, where ranks keep slices."""
    return all(step.primitive is SHARD for step in redistribution(source, target))


@lru_cache(maxsize=65536)
def eager_redistribution(source: DTensorSpec, target: DTensorSpec) -> tuple[Step | BlockExchange, ...]:
    """As `redistribution`, but in the least time outside of a program, where `BlockExchange` is a step, too.

    The time of a step is that of its bytes and of `LAUNCH_BYTES` more for its launch. No spec between the steps has
    shards that are larger than those of both ends. The specs may be of two meshes.

    Raises:
        ShardingError: specs of different metas.

    >>> import torch
    >>> from spmd.core.mesh import make_mesh
    >>> from spmd.core.spec import P, TensorMeta
    >>> mesh, meta = make_mesh({"x": 2, "y": 2}, runtime="virtual"), TensorMeta((4, 4), torch.float32)
    >>> source, target = (DTensorSpec.make(mesh, spec, meta) for spec in (P(("x", "y")), P("y")))
    >>> [str(step) for step in eager_redistribution(source, target)]
    ["exchange[x, y]: P(('x', 'y')) -> P('y')"]
    """
    if source.mesh == target.mesh:
        _check(source, target)
        return _joined(source, target, _cheapest(_without_trivial(source), _without_trivial(target), None, eager=True))
    if source.meta != target.meta:
        raise ShardingError(f"Only the spec of a value can change (got {source}, expected {target.meta}).")
    ways = [(*eager_redistribution(source, middle), BlockExchange(middle, target)) for middle in _middles(source)]
    return min(ways, key=lambda steps: sum(map(eager_cost, steps)))


def _middles(source: DTensorSpec) -> Iterator[DTensorSpec]:
    """The specs from which to leave a mesh: as it is, or with the pending reductions done in one of the usual ways."""
    yield source
    if axes := tuple(axis for axis, _ in source.partial):
        yield source.complete
        for dim in range(source.meta.ndim):
            dims = tuple(held + axes * (dim == number) for number, held in enumerate(source.dims))
            yield attrs.evolve(source.complete, dims=dims)


def _cheapest(
    source: DTensorSpec, goal: DTensorSpec, reduce_dtype: torch.dtype | None, *, eager: bool = False
) -> tuple[Any, ...]:
    """The cheapest steps through specs whose shards are not larger than those of the ends, or else through any.

    The first search puts axes only where the goal has them, the second elsewhere too, for a way that costs less; in a
    program it may not have more collectives.
    """
    for largest in (max(source.local_bytes(), goal.local_bytes()), math.inf):
        ways = Ways(goal, largest, eager, reduce_dtype)
        if found := ways.cheapest(source):
            most = math.inf if eager else found.collectives
            wider = attrs.evolve(ways, anywhere=_anywhere(source, goal), most_collectives=most)
            return ((wider.anywhere and wider.cheapest(source, found.price)) or found).steps
    raise ShardingError(
        f"No sequence of collectives leads from {source} to {goal} on {source.mesh}. Please report this."
    )


def _anywhere(source: DTensorSpec, goal: DTensorSpec) -> Dims:
    """All axes on the dims that the ends shard, and on the longest of the others; empty on meshes of many axes."""
    axes = without_trivial(source.mesh, source.mesh.names)
    if not 0 < len(axes) <= MOST_AXES:
        return ()
    sharded = [bool(before or after) for before, after in zip(source.dims, goal.dims, strict=True)]
    others = [dim for dim, used in enumerate(sharded) if not used]
    other = max(others, key=source.meta.shape.__getitem__, default=None)
    return tuple(axes if used or dim == other else () for dim, used in enumerate(sharded))


MOST_AXES = 4
"""The axes up to which there is a second search."""
