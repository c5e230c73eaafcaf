"""From tensors to DTensors: whole ones cut, the parts that processes have loaded joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.api.dtensor import DTensor, join_shards, wrap
from spmd.collectives.distributed.agreement import are_several, check_agreement, describe, failing_together, gather
from spmd.collectives.distributed.exchange import broadcast
from spmd.core.mesh import Coordinate, Mesh, Runtime, current_mesh
from spmd.core.placement import neutral_element
from spmd.core.pytree import broadcast_prefix, flatten_with_paths, leaf_meta, leaf_specs, tree_flatten
from spmd.core.spec import DTensorSpec
from spmd.errors import MeshError, ShardingError


def distribute(tree: Any, specs: Any, mesh: Mesh | None = None, *, src_rank: int | None = None) -> Any:
    """Place the tensors of a pytree on a mesh.

    On a distributed mesh all ranks call this together, each with the whole tree, of which it keeps its shards. That the
    trees are equal is checked by digests (of tensors above 16 MB, by samples), in one small collective.

    Args:
        tree: a pytree of tensors, whole and of any device, or DTensors, which are redistributed.
        specs: a pytree prefix of specs: `P`s, or tuples of one placement for each mesh axis. Where a spec is partial,
            index 0 of the axis holds the value and the others hold the neutral element.
        mesh: the mesh; by default that of `use_mesh`.
        src_rank: on a distributed mesh, the rank whose tensors are sent to all; on others only shapes and dtypes are
            looked at, so that meta tensors will do.

    Returns:
        The tree with DTensors for leaves. Their shards are copies; gradients do not flow through.

    Raises:
        DivergenceError: ranks with different trees, or on different meshes.
        ShardingError: specs that are no prefix of the tree, a spec that does not fit its tensor, a leaf that is none.
        MeshError: no mesh, an abstract one, or a DTensor on another mesh; no rank `src_rank`.

    >>> from spmd import P, make_mesh
    >>> mesh = make_mesh({"data": 2}, runtime="virtual")
    >>> placed = distribute({"w": torch.zeros(4, 3), "b": torch.zeros(3)}, {"w": P("data"), "b": P()}, mesh)
    >>> placed["w"]
    DTensor(f32[4,3] P('data') on Mesh(data=2), shards 2x[2,3])
    """
    mesh = current_mesh(mesh)
    call = f"distribute on {mesh}"
    with failing_together(call, are_several(mesh)):
        targets = leaf_specs(specs, tree, mesh, what="specs", item="leaf", of="the tree")
        paths, leaves, structure = flatten_with_paths(tree)
        names = [f"leaf {path}".rstrip() for path in paths]
        if src_rank is not None:
            mesh.coordinate(src_rank)  # a rank of the mesh
    if src_rank is None:
        check_same(call, mesh, names, leaves)
    else:
        leaves = _broadcast(call, mesh, names, leaves, src_rank)
    placed = [place(leaf, target, name) for leaf, target, name in zip(leaves, targets, names, strict=True)]
    return structure.unflatten(placed)


def check_same(call: str, mesh: Mesh, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Compare the plain tensors that the ranks of a distributed mesh hold, each the whole of them; specs of DTensors.

    Raises:
        DivergenceError: on every rank, if they differ; it names the leaf, and which ranks hold what.
    """
    if are_several(mesh):
        claims = {
            name: str(leaf.spec) if isinstance(leaf, DTensor) else describe(leaf)
            for name, leaf in zip(names, leaves, strict=True)
        }
        check_agreement(
            call,
            claims,
            "Every rank must hold the same whole tensor. To take one rank's, spmd.distribute(..., src_rank=0); where "
            "each rank has its own part, spmd.from_process_data(...).",
        )


def _broadcast(call: str, mesh: Mesh, names: Sequence[str], leaves: Sequence[Any], src_rank: int) -> list[Any]:
    """The leaves of one rank, on all of them; DTensors stay as they are."""
    if not are_several(mesh):
        return list(leaves)
    with failing_together(call):
        metas = [leaf_meta(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    has_data = [isinstance(leaf, torch.Tensor) and not leaf.is_meta for leaf in leaves]
    check_agreement(
        call,
        {name: f"{meta}" for name, meta in zip(names, metas, strict=True)},
        f"Ranks other than src_rank={src_rank} must give tensors of the same shapes and dtypes, such as meta tensors.",
    )
    if not all(gather(call, has_data)[src_rank]):
        raise ShardingError(f"src_rank={src_rank} must hold tensors with data. Meta tensors are for the other ranks.")
    received: list[Any] = []
    for leaf, meta in zip(leaves, metas, strict=True):
        if isinstance(leaf, DTensor):
            received.append(leaf)
            continue
        buffer = torch.empty(meta.shape, dtype=meta.dtype, device=mesh.device)
        if mesh.rank(mesh.held_coordinates[0]) == src_rank:
            buffer.copy_(leaf)
        received.append(broadcast(buffer, src_rank))
    return received


def from_process_data(tree: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Global tensors from what each process has loaded: its own part of a batch.

    The parts of ranks that differ in the axes of a dim are joined along that dim, in the order of the axes; ranks that
    differ in other axes must have loaded the same. On a virtual mesh this one process has all of the data: there it is
    `distribute`. `jax.make_array_from_process_local_data`. On a distributed mesh all ranks call this together.

    Args:
        tree: a pytree of tensors of any device; they go to the device of the mesh.
        specs: a pytree prefix of specs, none partial.
        mesh: the mesh; by default that of `use_mesh`.

    Raises:
        ShardingError: specs that do not fit; parts that are not the chunks of their sum, as `torch.chunk` cuts it.
        MeshError: no mesh, or an abstract one.

    >>> from spmd import P, make_mesh
    >>> from_process_data(torch.zeros(4, 3), P("data"), make_mesh({"data": 2}, runtime="virtual"))
    DTensor(f32[4,3] P('data') on Mesh(data=2), shards 2x[2,3])
    """
    mesh = current_mesh(mesh)
    if mesh.runtime is not Runtime.DISTRIBUTED:
        return distribute(tree, specs, mesh)
    call = f"from_process_data(..., {specs!r}) on {mesh}"
    with failing_together(call, are_several(mesh)):
        prefix = broadcast_prefix(specs, tree, what="specs", of="the tree")
        leaves, structure = tree_flatten(tree)
        held = [(leaf.detach().to(mesh.device) if isinstance(leaf, torch.Tensor) else leaf,) for leaf in leaves]
    return structure.unflatten(join_shards(call, held, prefix, mesh))


def place(value: torch.Tensor, spec: DTensorSpec, where: str = "the tensor") -> DTensor:
    """One tensor, plain or DTensor, of the spec's shape and dtype, placed by a spec.

    Raises:
        MeshError: an abstract mesh, or a DTensor on another mesh.
        ShardingError: not a tensor, or one without data.
    """
    if isinstance(value, DTensor):
        if value.mesh != spec.mesh:
            raise MeshError(
                f"{where} {value.spec} lies on {value.mesh} and not on {spec.mesh}. Assemble it first: .full_tensor()."
            )
        return value.redistribute(spec.pspec)
    check_placeable(value, spec, where)
    value = value.detach()
    return wrap(spec, tuple(_cut(value, spec, coordinate) for coordinate in spec.mesh.held_coordinates))


def check_placeable(value: Any, spec: DTensorSpec, where: str) -> None:
    """That a value, which is no DTensor, is a dense tensor with data."""
    if not isinstance(value, torch.Tensor) or (value.is_meta and spec.mesh.device.type != "meta"):
        kind = "a meta tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ShardingError(
            f"{where} must be a torch.Tensor with data (got {kind}). What has only a shape serves the stages of a "
            "jitted function: .trace, .plan and .lower."
        )
    if value.layout is not torch.strided:
        raise ShardingError(f"{where} must be dense (got layout {value.layout}). Pass it as .to_dense().")


def _cut(value: torch.Tensor, spec: DTensorSpec, coordinate: Coordinate) -> torch.Tensor:
    """The shard of the rank at `coordinate`, as a copy."""
    for axis, op in spec.partial:
        if coordinate[spec.mesh.axis_position(axis)] > 0:
            neutral = neutral_element(op, value.dtype)
            return torch.full(spec.local_shape(coordinate), neutral, dtype=value.dtype, device=spec.mesh.device)
    part = value[spec.local_slices(coordinate)]
    return part.to(spec.mesh.device, copy=True, memory_format=torch.contiguous_format)
