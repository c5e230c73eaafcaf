"""Eager redistribution of a value from one spec to another, on virtual and distributed meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from spmd.collectives import virtual
from spmd.collectives.distributed import exchange
from spmd.collectives.resharding import redistribution
from spmd.collectives.step import Step
from spmd.core.mesh import Runtime
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import ShardingError


def redistribute_shards(shards: Sequence[Tensor], source: DTensorSpec, target: DTensorSpec) -> tuple[Tensor, ...]:
    """Redistribute a value; on a distributed mesh all ranks must make the call.

    Args:
        shards: the shards that this process holds under `source`, in rank order: one on a distributed mesh,
            those of all ranks on a virtual mesh.
        source, target: specs of one mesh, shape and dtype.

    Returns:
        The shards that this process holds under `target`, in rank order; read-only, since ranks may share a tensor.

    Raises:
        MeshError: the mesh is abstract.
        ShardingError: specs of different meshes or metas, or a wrong number of shards.

    >>> from spmd.core.mesh import make_mesh
    >>> import torch
    >>> from spmd.core.spec import P, TensorMeta
    >>> mesh, meta = make_mesh({"x": 2}, runtime="virtual"), TensorMeta((2,), torch.int64)
    >>> source, target = DTensorSpec.make(mesh, P("x"), meta), DTensorSpec.make(mesh, P(), meta)
    >>> redistribute_shards([torch.tensor([1]), torch.tensor([2])], source, target)
    (tensor([1, 2]), tensor([1, 2]))
    """
    mesh, held = source.mesh, source.mesh.held_coordinates
    if len(shards) != len(held):
        raise ShardingError(
            f"Expected one shard for each of the {len(held)} ranks of {mesh} that live in this process "
            f"(got {len(shards)})."
        )
    for step in redistribution(source, target):
        if mesh.runtime is Runtime.DISTRIBUTED:
            (x,), (coordinate,) = shards, held
            shards = [exchange.run(step.primitive, mesh, coordinate, x, step.arguments(coordinate))]
        else:
            calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
                ((x, *step.arguments(where)), {}) for x, where in zip(shards, held, strict=True)
            ]
            shards = virtual.run(step.primitive, mesh, calls)
    return tuple(shards)


def start_redistribution(
    shards: Sequence[Tensor], source: DTensorSpec, target: DTensorSpec, cause: str
) -> Callable[[], tuple[Tensor, ...]]:
    """Redistribute a value on a distributed mesh, up to its last collective, which is only started.

    Earlier ones are waited for, so that what is left to do needs no other rank to come along.

    Args:
        shards, source, target: as for `redistribute_shards`.
        cause: the user's call and where it is, for the error of a collective that fails.

    Returns:
        A function that waits for the collective, does the rest, and returns the shards; it is to be called once.
    """
    (x,), (coordinate,), steps = shards, source.mesh.held_coordinates, redistribution(source, target)

    def bound(step: Step, x: Tensor) -> Any:
        return exchange.bind(
            step.primitive, source.mesh, coordinate, TensorMeta.of(x), step.arguments(coordinate), cause
        )

    def run(steps: Sequence[Step], x: Tensor) -> Tensor:
        for step in steps:
            x = bound(step, x)(x)
        return x

    last = max((number for number, step in enumerate(steps) if step.is_collective), default=None)
    if last is None:
        moved = run(steps, x)
        return lambda: (moved,)
    sent = run(steps[:last], x)
    call = bound(steps[last], sent)
    pending = call.start(sent)

    def finish(_: Tensor = sent) -> tuple[Tensor, ...]:  # held, so that nothing writes to it while it is being sent
        return (run(steps[last + 1 :], call.finish(pending)),)

    return finish
