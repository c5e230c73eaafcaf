"""From tensors to DTensors: by sharding whole tensors, or by joining the parts that processes have loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch

from spmd.api.values.dtensor import DTensor, of_parts, wrap
from spmd.api.values.gradient_specs import gradient_spec
from spmd.api.values.joint_shards import joint_specs
from spmd.api.values.leaves import as_argument
from spmd.api.values.linear import gradients_of, is_computed, linear, refuse_gradients
from spmd.collectives.distributed.agreement import check_agreement, describe, failing_together, gather, spans_processes
from spmd.collectives.distributed.scatter import Scatter
from spmd.core.mesh import Coordinate, Mesh, Runtime, current_mesh
from spmd.core.pytree import broadcast_prefix, flatten_with_paths, leaf_meta, leaf_specs, tree_map
from spmd.core.spec import QUANTIZED, DTensorSpec
from spmd.errors import MeshError, ShardingError
from spmd.job.tracebacks import hides_internals

_Tree = TypeVar("_Tree")


@overload
def distribute(
    tree: torch.Tensor, specs: object, mesh: Mesh | None = None, *, src_rank: int | None = None
) -> DTensor: ...


@overload
def distribute(tree: _Tree, specs: object, mesh: Mesh | None = None, *, src_rank: int | None = None) -> _Tree: ...


@hides_internals
def distribute(tree: Any, specs: Any, mesh: Mesh | None = None, *, src_rank: int | None = None) -> Any:
    """Place the tensors of a pytree on a mesh.

    On a distributed mesh this is a collective call: each rank passes the whole tree, and keeps its shards. One small
    collective checks that the trees are equal, by digests (for tensors above 16 MiB, of samples).

    Args:
        tree: a pytree of whole tensors on any device, of arrays of NumPy, or of DTensors, which are redistributed.
        specs: a pytree prefix of specs: `P`s, or tuples of one placement for each mesh axis. Where a spec is partial,
            the rank at index 0 of the axis holds the value, and the others hold the neutral element.
        mesh: the mesh; by default that of `use_mesh`.
        src_rank: on a distributed mesh, the rank of the mesh (counted from 0 in it) whose tensors count; of those of
            other ranks only shapes and dtypes matter, so they can be meta tensors. It sends one tensor after the other,
            to each rank its shard: a rank holds its shards and a bucket of at most 16 MiB. By default nothing is sent.

    Returns:
        The tree with DTensors for leaves, by type the same tree, or a DTensor for one tensor; floats in it stay. Shards
        are copies. Gradients flow through to tensors that autograd has computed; what is distributed of a leaf (a
        parameter) is a new leaf, without a gradient.

    Raises:
        DivergenceError: ranks with different trees, or on different meshes.
        ShardingError: specs that are no prefix of the tree, a spec that does not fit its tensor, or a leaf that is not
            a tensor. Or a tensor that needs a gradient which cannot flow: with `src_rank`, or under `torch.func`.
        MeshError: no mesh, an abstract one, or a DTensor on another mesh; no rank `src_rank`.

    >>> from spmd import P, make_mesh
    >>> mesh = make_mesh({"data": 2}, runtime="virtual")
    >>> placed = distribute({"w": torch.zeros(4, 3), "b": torch.zeros(3)}, {"w": P("data"), "b": P()}, mesh)
    >>> placed["w"]
    DTensor(f32[4,3] P('data') on Mesh(data=2), shards 2x[2,3])
    """
    mesh = current_mesh(mesh)
    call = f"distribute on {mesh}"
    with failing_together(call, mesh):
        tree = tree_map(as_argument, tree)
        every = leaf_specs(specs, tree, mesh, what="specs", item="leaf", of="the tree", numbers=True)
        paths, held, structure = flatten_with_paths(tree)
        tensors_at = [number for number, spec in enumerate(every) if spec is not None]
        targets = [spec for spec in every if spec is not None]
        leaves = [held[number] for number in tensors_at]
        names = [f"leaf {paths[number]}".rstrip() for number in tensors_at]
        call += gradients_of(leaves, names)
        if src_rank is not None:
            mesh.coordinate(src_rank)  # a rank of the mesh
            refuse_gradients(leaves, names)
    scatter = None
    if src_rank is None:
        check_same(call, mesh, names, leaves)
    elif spans_processes(mesh):
        check_source(call, mesh, names, leaves, src_rank)
        scatter = Scatter(mesh, src_rank)
    placed = [_placed(leaf, target, name, scatter) for leaf, target, name in zip(leaves, targets, names, strict=True)]
    found: dict[int, Any] = dict(enumerate(held)) | dict(zip(tensors_at, placed, strict=True))
    return structure.unflatten(found.values())


def _placed(leaf: Any, spec: DTensorSpec, name: str, scatter: Scatter | None) -> DTensor:
    """Place a tensor, recorded by autograd if it has computed the tensor."""
    if not is_computed(leaf):
        return place(leaf, spec, name, scatter)
    return linear(  # type: ignore[no-any-return]
        lambda value: place(value, spec, name), lambda cotangent: cotangent.full_tensor().to(leaf.device), leaf
    )


def check_same(call: str, mesh: Mesh, names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Check that all ranks of a distributed mesh hold the same plain tensors, and DTensors of the same specs.

    Raises:
        DivergenceError: on every rank, if they differ; it names the leaf, and which ranks hold what.
    """
    if spans_processes(mesh):
        with failing_together(call, mesh):
            claims = {
                name: str(leaf.spec) if isinstance(leaf, DTensor) else describe(leaf)
                for name, leaf in zip(names, leaves, strict=True)
            }
        check_agreement(
            call,
            claims,
            "Every rank must hold the same whole tensor. To take one rank's, spmd.distribute(..., src_rank=0); where "
            "each rank has its own part, spmd.from_process_data(...).",
            mesh.ranks,
        )


def check_source(call: str, mesh: Mesh, names: Sequence[str], leaves: Sequence[Any], src_rank: int) -> None:
    """Check that one rank of a distributed mesh holds tensors, and the others some of the same shapes and dtypes.

    Raises:
        DivergenceError: on every rank, if shapes or dtypes differ; it names the leaf.
        ShardingError: on every rank, if the one lacks a tensor.
    """
    with failing_together(call, mesh):
        claims = {name: _claim(leaf, name) for leaf, name in zip(leaves, names, strict=True)}
    check_agreement(
        call,
        claims,
        f"Ranks other than src_rank={src_rank} must give tensors of the same shapes and dtypes, such as meta tensors.",
        mesh.ranks,
    )
    has_data = [isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_meta for leaf in leaves]
    if not all(gather(call, has_data, mesh.ranks)[src_rank]):
        raise ShardingError(
            f"src_rank={src_rank} must hold tensors with data, and dense ones. Meta tensors are for the other ranks."
        )


def _claim(leaf: Any, name: str) -> str:
    return f"{leaf.spec} on {leaf.mesh}" if isinstance(leaf, DTensor) else str(leaf_meta(leaf, name))


@overload
def from_process_data(tree: torch.Tensor, specs: object, mesh: Mesh | None = None) -> DTensor: ...


@overload
def from_process_data(tree: _Tree, specs: object, mesh: Mesh | None = None) -> _Tree: ...


@hides_internals
def from_process_data(tree: Any, specs: Any, mesh: Mesh | None = None) -> Any:
    """Global tensors from the part that each process has loaded; `jax.make_array_from_process_local_data`.

    A dim that the spec shards over some axes joins the parts of the ranks along these axes, in the order of the axes.
    Ranks that differ only in other axes must have loaded equal parts, which is checked, by digests (for tensors above
    16 MiB, of samples). On a distributed mesh this is a collective call. On a virtual mesh, where one process has all
    of the data, it is `distribute`.

    Args:
        tree: a pytree of tensors on any device, or of arrays of NumPy; they are moved to the device of the mesh.
        specs: a pytree prefix of specs, none partial.
        mesh: the mesh; by default that of `use_mesh`.

    Returns:
        The tree with DTensors for leaves. Gradients flow through as by `distribute`: to its part, on each process.

    Raises:
        DivergenceError: ranks make different calls, or have loaded different parts where they must be equal.
        ShardingError: specs that do not fit, or parts that are not the chunks of `torch.chunk` of the joined tensor.
        MeshError: no mesh, or an abstract one.

    >>> from spmd import P, make_mesh
    >>> from_process_data(torch.zeros(4, 3), P("data"), make_mesh({"data": 2}, runtime="virtual"))
    DTensor(f32[4,3] P('data') on Mesh(data=2), shards 2x[2,3])
    """
    mesh = current_mesh(mesh)
    if mesh.runtime is not Runtime.DISTRIBUTED:
        return distribute(tree, specs, mesh)
    call = f"from_process_data(..., {specs!r}) on {mesh}"
    with failing_together(call, mesh):
        tree = tree_map(as_argument, tree)
        prefix = broadcast_prefix(specs, tree, what="specs", of="the tree")
        paths, leaves, structure = flatten_with_paths(tree)
        names = [f"leaf {path}".rstrip() for path in paths]
        call += gradients_of(leaves, names)
        held = [
            (_on_device(leaf, mesh, name) if isinstance(leaf, torch.Tensor) else leaf,)
            for leaf, name in zip(leaves, names, strict=True)
        ]
    found = joint_specs(call, held, prefix, mesh, names=names)
    parts = zip(found, held, strict=True)
    return structure.unflatten([of_parts(spec, *shards, gradient=gradient_spec(spec, None)) for spec, shards in parts])


def _on_device(leaf: torch.Tensor, mesh: Mesh, where: str) -> torch.Tensor:
    check_placeable(leaf, mesh, where)
    return (leaf if is_computed(leaf) else leaf.detach()).to(mesh.device)


def place(value: torch.Tensor, spec: DTensorSpec, where: str = "the tensor", scatter: Scatter | None = None) -> DTensor:
    """The DTensor with a given spec of one tensor.

    Args:
        value: a whole tensor or a DTensor, with the spec's shape and dtype.
        spec: the spec.
        where: the name of the tensor, for errors.
        scatter: sends the shards of the rank that has `value`, after `check_source`; by default each rank has it.

    Raises:
        MeshError: an abstract mesh, or a DTensor on another mesh.
        ShardingError: `value` is not a dense tensor with data.
    """
    if isinstance(value, DTensor):
        if value.mesh != spec.mesh:
            raise MeshError(
                f"{where} {value.spec} is on {value.mesh} and not on {spec.mesh}. Assemble it first: .full_tensor()."
            )
        return value.redistribute(spec.pspec)
    if scatter is not None:
        return wrap(spec, (scatter(value, spec),))
    check_placeable(value, spec.mesh, where)
    value = value.detach()
    return wrap(spec, tuple(_cut(value, spec, coordinate) for coordinate in spec.mesh.held_coordinates))


def check_placeable(value: Any, mesh: Mesh, where: str) -> None:
    """Raise a ShardingError if a value, which is no DTensor, is not a dense tensor with data."""
    if not isinstance(value, torch.Tensor) or (value.is_meta and mesh.device.type != "meta"):
        kind = "a meta tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ShardingError(
            f"{where} must be a torch.Tensor with data (got {kind}). What has only a shape serves the stages of a "
            "jitted function: .trace, .plan and .lower."
        )
    if value.layout is not torch.strided:
        raise ShardingError(f"{where} must be dense (got layout {value.layout}). Pass it as .to_dense().")
    if value.is_quantized:
        raise ShardingError(f"{where} is {QUANTIZED}")


def _cut(value: torch.Tensor, spec: DTensorSpec, coordinate: Coordinate) -> torch.Tensor:
    """The shard of the rank at `coordinate`, as a copy."""
    if (neutral := spec.neutral_at(coordinate)) is not None:
        return torch.full(spec.local_shape(coordinate), neutral, dtype=value.dtype, device=spec.mesh.device)
    part = value[spec.local_slices(coordinate)]
    return part.to(spec.mesh.device, copy=True, memory_format=torch.contiguous_format)
