"""The shards that processes bring for a DTensor, checked together: they must be those of one global tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from spmd.collectives.distributed.agreement import describe, gather_with_replicas, spans_processes
from spmd.collectives.distributed.replicas import Replica, replicated_axes
from spmd.collectives.distributed.replicas import difference as replicas_differ
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.pytree import SpecLike, make_spec
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import DivergenceError, ShardingError
from spmd.job.collective_scope import who_says_what


@attrs.frozen
class _Facts:
    """The facts of a shard that ranks exchange: its meta and device; of a DTensor or no tensor, only the type."""

    kind: str
    meta: TensorMeta | None
    device: str

    @classmethod
    def of(cls, shard: Any) -> _Facts:
        if not isinstance(shard, torch.Tensor) or hasattr(shard, "full_tensor"):  # a DTensor is no shard
            return cls(type(shard).__name__, None, "")
        if shard.is_quantized:
            return cls(f"one that is quantized, {shard.dtype}", None, "")
        return cls("torch.Tensor", TensorMeta.of(shard), shard.device.type)


def joint_specs(
    call: str,
    held: Sequence[Sequence[torch.Tensor]],
    specs: Sequence[SpecLike],
    mesh: Mesh,
    shape: Sequence[int] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> list[DTensorSpec]:
    """The specs of the DTensors of which all processes hold shards; on a distributed mesh a collective call.

    Args:
        call: the user's call, as for `gather`.
        held: for each DTensor, the shards of this process's ranks in rank order.
        specs: the spec of each DTensor.
        mesh: the mesh.
        shape: the global shape of all of them; by default computed from the shards.
        names: the name of each DTensor, for messages, if replicas are to be compared, by digests.

    Raises:
        ShardingError: a wrong number of shards, or a shard that does not match its spec.
        DivergenceError: ranks make different calls, or hold replicas that differ.
        SpmdError: a rank failed, or never makes the call.
    """
    facts = [[_Facts.of(shard) for shard in shards] for shards in held]
    every, difference = [facts], None
    if spans_processes(mesh):
        replicas = _replicas(mesh, names or (), held, facts, specs)
        every, difference = gather_with_replicas(call, facts, mesh, replicas)
    count = len(mesh.held_coordinates)
    found = []
    for number, spec in enumerate(specs):
        ranks: list[_Facts] = []
        for process, given in enumerate(every):
            here = given[number] if number < len(given) else []
            if len(here) != count:
                where = f"process {mesh.ranks[process]}" if len(every) > 1 else "this process"
                raise ShardingError(
                    f"from_local needs one shard for each of the {count} ranks of {mesh} that {where} holds "
                    f"(got {len(here)})."
                )
            ranks += here
        name = names[number] if names else "the tensor"
        found.append(_joint_spec(ranks, spec, mesh, shape, f"{name} of {call}"))
    if names and count == mesh.size:
        each = [
            _replicas(mesh, names, [[s[rank]] for s in held], [[f[rank]] for f in facts], specs)
            for rank in range(count)
        ]
        difference = replicas_differ(mesh, each)
    if difference is not None:
        raise DivergenceError(
            f"In {call}, {difference}. Along axes that its spec does not name, ranks must hold the same: load it from "
            "the same part of the data, or take that of one rank by spmd.distribute(..., src_rank=0)."
        )
    return found


def _replicas(
    mesh: Mesh,
    names: Sequence[str],
    held: Sequence[Sequence[Any]],
    facts: Sequence[Sequence[_Facts]],
    specs: Sequence[SpecLike],
) -> list[Replica]:
    """The shards of this process that other ranks hold too."""
    found = []
    for name, shards, known, spec in zip(names, held, facts, specs, strict=False):
        if axes := replicated_axes(mesh, spec if isinstance(spec, P) else tuple(spec)):
            texts = [describe(shard) if fact.meta else fact.kind for shard, fact in zip(shards, known, strict=True)]
            found.append(Replica(name, axes, "; ".join(texts)))
    return found


def check_shards(spec: DTensorSpec, shards: Sequence[torch.Tensor]) -> None:
    """Check that shards are those of this process's ranks, under a spec.

    Raises:
        ShardingError: a shard whose shape, dtype or device does not match the spec.
    """
    for coordinate, shard in zip(spec.mesh.held_coordinates, shards, strict=True):
        _check_shard(spec, coordinate, _Facts.of(shard))


def _joint_spec(
    ranks: Sequence[_Facts], spec: SpecLike, mesh: Mesh, shape: Sequence[int] | None, where: str
) -> DTensorSpec:
    """The spec of a tensor, checked against the facts of the shards of all ranks."""
    metas: list[TensorMeta] = []
    for rank, held in enumerate(ranks):
        if held.meta is None:
            raise ShardingError(f"Shard of rank {mesh.ranks[rank]} must be a plain torch.Tensor (got {held.kind}).")
        metas.append(held.meta)
    pspec = make_spec(mesh, spec, metas[0], where=f"shard of rank {mesh.ranks[0]}").pspec
    meta = TensorMeta(_global_shape(metas, mesh, pspec) if shape is None else shape, metas[0].dtype)
    complete = make_spec(mesh, pspec, meta, where="global tensor")
    if shape is None:
        _check_chunks(complete, metas, where)
    for coordinate, held in zip(mesh.coordinates(), ranks, strict=True):
        _check_shard(complete, coordinate, held)
    return complete


def _global_shape(metas: Sequence[TensorMeta], mesh: Mesh, pspec: P) -> tuple[int, ...]:
    """The global shape: a sharded dim has the sum of the lengths on ranks that differ only in the axes of the dim."""
    shape = list(metas[0].shape)
    for dim, axes in enumerate(pspec.dims):
        if axes:
            ranks = mesh.groups(axes)[0]
            shape[dim] = sum(metas[rank].shape[dim] if dim < metas[rank].ndim else 0 for rank in ranks)
    return tuple(shape)


def _check_chunks(spec: DTensorSpec, metas: Sequence[TensorMeta], where: str) -> None:
    """ShardingError if only the lengths of sharded dims differ from what a spec, the joined one, gives each rank."""
    mesh, sharded = spec.mesh, [dim for dim, axes in enumerate(spec.dims) if axes]
    rest = lambda meta: (meta.dtype, *(None if dim in sharded else size for dim, size in enumerate(meta.shape)))  # noqa: E731
    for dim in sharded if len(set(map(rest, metas))) == 1 else ():
        lengths = [meta.shape[dim] for meta in metas]
        expected = [spec.local_shape(coordinate)[dim] for coordinate in mesh.coordinates()]
        if lengths != expected:
            held, chunks = (dict(zip(mesh.ranks, map(str, each), strict=True)) for each in (lengths, expected))
            raise ShardingError(
                f"{where}: dim {dim} has length {who_says_what(held)}. Joined by {spec.pspec!r} it is "
                f"{spec.meta.shape[dim]} long, of which torch.chunk gives {who_says_what(chunks)}. Give all ranks "
                "equal lengths, as a data loader does with drop_last=True, or these."
            )


def _check_shard(spec: DTensorSpec, coordinate: Coordinate, held: _Facts) -> None:
    rank = spec.mesh.ranks[spec.mesh.rank(coordinate)]
    expected = TensorMeta(spec.local_shape(coordinate), spec.meta.dtype)
    if held.meta != expected:
        raise ShardingError(
            f"Shard of rank {rank} must be {expected} for a global tensor {spec} on {spec.mesh} (got {held.meta})."
        )
    if held.device != spec.mesh.device.type:
        raise ShardingError(f"Shard of rank {rank} must be on {spec.mesh.device} (got {held.device}).")
