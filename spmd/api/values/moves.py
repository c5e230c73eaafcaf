"""How a DTensor's shards go to another spec: where to, which ranks agree on it first, and what the others are told."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TypeAlias

import torch

from spmd.api.values.communication import is_watched, record_move
from spmd.collectives.distributed.agreement import gather
from spmd.collectives.resharding import eager_redistribution
from spmd.core.mesh import Mesh, Runtime, check_mesh
from spmd.core.own_storage import own_storage
from spmd.core.pytree import SpecLike, make_spec
from spmd.core.spec import DTensorSpec
from spmd.errors import MeshError, ShardingError
from spmd.job.collective_scope import name_ranks
from spmd.job.process import process_index
from spmd.runtime.redistribute import check_same_job, coordinates_here, redistribute_shards, start_redistribution


def target_of(source: DTensorSpec, spec: SpecLike | DTensorSpec, mesh: Mesh | None) -> DTensorSpec:
    """The spec that the arguments of `DTensor.redistribute` name.

    Raises:
        ShardingError: it does not fit the mesh or the tensor.
        MeshError: another mesh than that of a DTensorSpec, or one that values cannot go to.
    """
    if isinstance(spec, DTensorSpec):
        if mesh is not None and mesh != spec.mesh:
            raise MeshError(f"The spec {spec} is on {spec.mesh}, and mesh is {mesh}. Leave out mesh=...")
        if spec.meta != source.meta:
            raise ShardingError(f"redistribute() got a spec of {spec.meta} for the tensor {source.meta}.")
        mesh, spec = spec.mesh, spec.pspec
    target = make_spec(source.mesh if mesh is None else check_mesh(mesh), spec, source.meta, where="the tensor")
    if target.mesh != source.mesh:
        check_same_job(source.mesh, target.mesh)
    return target


Shards: TypeAlias = tuple[torch.Tensor, ...]


def move_shards(
    call: str, shards: Callable[[], Shards], source: DTensorSpec, target: DTensorSpec, agreed: bool = False
) -> Shards:
    """The shards under another spec, no views of larger tensors; ranks that communicate check that all make this call.

    Args:
        call: the user's call, as text.
        shards: returns the shards that this process holds; not called by a process that the mesh is not over.
        source, target: the specs.
        agreed: whether ranks have compared their calls already.
    """
    held = _announced(call, shards, source, target, agreed)
    moved = redistribute_shards(held, source, target)
    return moved if all(map(operator.is_, moved, held)) else own_storage(*moved)


def start_move(
    call: str, shards: Callable[[], Shards], source: DTensorSpec, target: DTensorSpec, where: str
) -> Callable[[], Shards]:
    """As `move_shards`, up to the last collective, which is only started; the function that is returned waits for it.

    Args:
        call, shards, source, target: as for `move_shards`.
        where: the user's line, for errors of the collective.
    """
    return start_redistribution(_announced(call, shards, source, target), source, target, f"{call} at {where}")


def _announced(
    call: str, shards: Callable[[], Shards], source: DTensorSpec, target: DTensorSpec, agreed: bool = False
) -> Shards:
    """The shards that are moved, after the call is recorded and ranks have compared it."""
    crosses = source.mesh != target.mesh
    held = () if crosses and not coordinates_here(source.mesh) else shards()
    if is_watched():
        record_move(call, source, target)
    distributed = source.mesh.runtime is Runtime.DISTRIBUTED
    ranks = tuple(sorted({*source.mesh.ranks, *target.mesh.ranks})) if crosses else source.mesh.ranks
    compares = distributed and not agreed and len(ranks) > 1 and process_index() in ranks
    if compares and any(step.is_collective for step in eager_redistribution(source, target)):
        gather(f"{call} of {source} on {source.mesh}", None, ranks)
    return held


def why_outside(mesh: Mesh) -> tuple[str, str]:
    """Why a DTensor has no shards in a process that its mesh is not over, for `lose_shards`."""
    return (
        "not on this process",
        f"it went to {mesh}, which has {name_ranks(mesh.ranks)}; this process is rank {process_index()} of the job. "
        "Guard what runs on that mesh: `if spmd.process_index() in mesh.ranks:`, or bring the tensor back: "
        ".redistribute(spec, mesh=...) on all ranks of both meshes.",
    )
