"""Eager redistribution of a value from one spec to another, on virtual and distributed meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from spmd.collectives import virtual
from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.distributed import exchange
from spmd.collectives.distributed.blocks import exchange_blocks, start_exchange
from spmd.collectives.resharding import eager_redistribution
from spmd.collectives.step import Step
from spmd.collectives.transport.exchange import Exchange
from spmd.core.mesh import Coordinate, Mesh, Runtime
from spmd.core.own_storage import own_storage
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.errors import MeshError, ShardingError
from spmd.job.process import process_index


def redistribute_shards(
    shards: Sequence[Tensor],
    source: DTensorSpec,
    target: DTensorSpec,
    steps: Sequence[Step | BlockExchange] | None = None,
) -> tuple[Tensor, ...]:
    """Redistribute a value; on distributed meshes all their ranks must make the call.

    Beside the argument, a rank holds the operand and the result of one step, and what that step sends and receives; no
    spec between the steps has larger shards than those of both ends.

    Args:
        shards: the shards that this process holds under `source`, in rank order: one on a distributed mesh, none if the
            process is not in it, those of all ranks on a virtual mesh.
        source, target: specs of one shape and dtype, on meshes of one runtime.
        steps: the steps that lead from one to the other; by default those of `eager_redistribution`.

    Returns:
        The shards that this process holds under `target`, in rank order; read-only, since ranks may share a tensor, and
        perhaps views of larger ones.

    Raises:
        MeshError: a mesh is abstract, or the meshes do not go together.
        ShardingError: specs of different metas, or a wrong number of shards.

    >>> from spmd.core.mesh import make_mesh
    >>> import torch
    >>> from spmd.core.spec import P, TensorMeta
    >>> mesh, meta = make_mesh({"x": 2}, runtime="virtual"), TensorMeta((2,), torch.int64)
    >>> source, target = DTensorSpec.make(mesh, P("x"), meta), DTensorSpec.make(mesh, P(), meta)
    >>> redistribute_shards([torch.tensor([1]), torch.tensor([2])], source, target)
    (tensor([1, 2]), tensor([1, 2]))
    """
    if source.mesh != target.mesh:
        check_same_job(source.mesh, target.mesh)
    held = coordinates_here(source.mesh)
    if len(shards) != len(held):
        raise ShardingError(
            f"Expected one shard for each of the {len(held)} ranks of {source.mesh} that live in this process "
            f"(got {len(shards)})."
        )
    found = tuple(shards)
    del shards
    for step in eager_redistribution(source, target) if steps is None else steps:
        found = _exchanged(step, found) if isinstance(step, BlockExchange) else _stepped(step, found, held)
    return found


def _stepped(step: Step, shards: tuple[Tensor, ...], held: Sequence[Coordinate]) -> tuple[Tensor, ...]:
    mesh = step.source.mesh
    if mesh.runtime is Runtime.DISTRIBUTED:
        pairs = zip(shards, held, strict=True)
        return tuple(exchange.run(step.primitive.op, mesh, where, x, step.arguments(where)) for x, where in pairs)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, *step.arguments(where)), {}) for x, where in zip(shards, held, strict=True)
    ]
    return tuple(virtual.run(step.primitive.op, mesh, calls))


def _exchanged(step: BlockExchange, shards: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if step.source.mesh.runtime is Runtime.VIRTUAL:
        return step.run_virtual(shards)
    if process_index() not in step.processes:
        return ()
    shard = exchange_blocks(step, shards[0] if shards else None)
    return () if shard is None else (shard,)


def coordinates_here(mesh: Mesh) -> tuple[Coordinate, ...]:
    """The coordinates of a mesh's ranks in this process; none on a distributed mesh that is not over it."""
    outside = mesh.runtime is Runtime.DISTRIBUTED and process_index() not in mesh.ranks
    return () if outside else mesh.held_coordinates


def check_same_job(source: Mesh, target: Mesh) -> None:
    """MeshError unless values can go from one mesh to another."""
    if source.runtime is not target.runtime or source.device.type != target.device.type:
        raise MeshError(
            f"A value on {source} ({source.runtime.value}, {source.device}) cannot go to {target} "
            f"({target.runtime.value}, {target.device}): both meshes must have one runtime and one kind of device. "
            "Assemble it first: spmd.distribute(x.full_tensor(), spec, mesh)."
        )


def start_redistribution(
    shards: Sequence[Tensor], source: DTensorSpec, target: DTensorSpec, cause: str
) -> Callable[[], tuple[Tensor, ...]]:
    """Redistribute a value on distributed meshes, up to the last collective, which is only started.

    Earlier ones are waited for, so that what is left to do needs no other rank to come along.

    Args:
        shards, source, target: as for `redistribute_shards`.
        cause: the user's call and where it is, for the error of a collective that fails.

    Returns:
        A function that waits for the collective, does the rest, and returns the shards, which are no views of larger
        tensors; it is to be called once.
    """
    steps = eager_redistribution(source, target)
    last = max((number for number, step in enumerate(steps) if step.is_collective), default=None)
    if last is None:
        moved = own_storage(*redistribute_shards(shards, source, target, steps))
        return lambda: moved
    sent, step = redistribute_shards(shards, source, target, steps[:last]), steps[last]
    receive = _started(step, sent, cause)

    def finish(_: tuple[Tensor, ...] = sent) -> tuple[Tensor, ...]:  # held: nothing writes to what is being sent
        return own_storage(*redistribute_shards(receive(), step.target, target, steps[last + 1 :]))

    return finish


def _started(step: Step | BlockExchange, shards: tuple[Tensor, ...], cause: str) -> Callable[[], tuple[Tensor, ...]]:
    """A collective on this process's shard, if it has one, that is started; the function waits for the result."""
    if isinstance(step, BlockExchange):
        if process_index() not in step.processes:
            return tuple
        wait = start_exchange(step, shards[0] if shards else None, cause)
        return lambda: tuple(shard for shard in (wait(),) if shard is not None)
    (x,), (where,) = shards, step.source.mesh.held_coordinates
    call = exchange.bind(step.primitive.op, step.source.mesh, where, TensorMeta.of(x), step.arguments(where), cause)
    assert isinstance(call, Exchange)
    pending = call.start(x)
    return lambda: (call.finish(pending),)
