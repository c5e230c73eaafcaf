"""Fully sharded specs: every tensor is split over one mesh axis, as by ZeRO-3 and FSDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from spmd.api.model_specs.leaves import Choice, Leaf, Show, check_spec, leaves_of, table
from spmd.core.mesh import Mesh, check_mesh
from spmd.core.modules import by_first_name
from spmd.core.pytree import SpecLike, broadcast_prefix
from spmd.core.spec import P, TensorMeta
from spmd.errors import ShardingError
from spmd.job.tracebacks import hides_internals

_Key = TypeVar("_Key")


@overload
def fsdp_specs(
    tree_or_module: nn.Module,
    axis: str,
    *,
    base: object = ...,
    min_size: int = 1024,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> dict[str, P]: ...


@overload
def fsdp_specs(
    tree_or_module: Mapping[_Key, torch.Tensor | TensorMeta],
    axis: str,
    *,
    base: object = ...,
    min_size: int = 1024,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> dict[_Key, P]: ...


@overload
def fsdp_specs(
    tree_or_module: object,
    axis: str,
    *,
    base: object = ...,
    min_size: int = 1024,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> object: ...


@hides_internals
def fsdp_specs(
    tree_or_module: Any,
    axis: str,
    *,
    base: Any = P(),
    min_size: int = 1024,
    mesh: Mesh | None = None,
    show: Show | None = None,
) -> Any:
    """Fully sharded specs for a tree of tensors: each is split along one of its dims over a mesh axis.

    With a mesh, the dim is the largest of those that the axis divides evenly, as usual in JAX; preferred are dims that
    `base` leaves whole. Where the axis divides none, it is the largest dim, and shards are uneven. Without a mesh it is
    the first dim that `base` leaves whole: dim 0, as in torch's FSDP2. Gradients and the state of an optimizer take the
    same specs.

    Args:
        tree_or_module: as for `spmd.specs`.
        axis: the mesh axis.
        base: a pytree prefix of specs to which the axis is added, such as tensor-parallel ones over another axis. Where
            a dim is sharded already, `axis` is its minor axis.
        min_size: the number of elements below which a tensor keeps its `base` spec: gathering it costs a latency, and
            it hardly costs memory.
        mesh: the mesh, if it is known.
        show: is called with a table of the specs: `print`.

    Returns:
        A tree of the same structure with specs for leaves; for a module, a dict by the names of its parameters and
        buffers.

    Raises:
        ShardingError: an axis that is not a name or that `base` uses already; specs in `base` that are no prefix of the
            tree or do not fit their tensors; a leaf that is not a tensor.
        MeshError: an axis that the mesh lacks.

    >>> import torch
    >>> fsdp_specs({"w": torch.zeros(8, 1024), "b": torch.zeros(8)}, "data")
    {'w': P('data'), 'b': P()}
    >>> from spmd import make_mesh
    >>> fsdp_specs({"w": torch.zeros(8, 1024)}, "data", mesh=make_mesh({"data": 4}, runtime="virtual"))
    {'w': P(None, 'data')}
    """
    if mesh is not None:
        check_mesh(mesh)
    if not isinstance(axis, str):
        raise ShardingError(f"axis must be the name of a mesh axis (got {axis!r}).")
    if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0:
        raise ShardingError(f"min_size must be a number of elements, 0 or more (got {min_size!r}).")
    leaves, structure = leaves_of(tree_or_module)
    if isinstance(tree_or_module, torch.nn.Module) and isinstance(base, Mapping):
        base = by_first_name(base, tree_or_module)
    given = broadcast_prefix(base, structure.unflatten(leaves), what="base", of="the tree")
    choices = [
        _choose(leaf, _pspec(spec, leaf, mesh), axis, min_size, mesh) for leaf, spec in zip(leaves, given, strict=True)
    ]
    if show is not None:
        show(table(choices, mesh, "why"))
    return structure.unflatten([choice.spec for choice in choices])


def _pspec(spec: SpecLike, leaf: Leaf, mesh: Mesh | None) -> P:
    """A spec as a P."""
    check_spec(spec, leaf, mesh)
    if isinstance(spec, P):
        return spec
    if mesh is None:
        raise ShardingError(f"base has placements for {leaf.where}, {spec!r}: they need mesh=..., or write a P.")
    return P.from_placements(spec, mesh)


def _choose(leaf: Leaf, base: P, axis: str, min_size: int, mesh: Mesh | None) -> Choice:
    if axis in (name for dim in base.dims for name in dim) or axis in dict(base.partial):
        raise ShardingError(f"{leaf.where} {leaf.meta}: its base spec {base!r} uses mesh axis {axis!r} already.")
    if mesh is not None:
        mesh.axis_position(axis)  # an axis of the mesh
    if leaf.meta.numel < max(min_size, 1) or not leaf.meta.ndim:
        return Choice(leaf, base, f"whole: below min_size={min_size}")
    dims = [*base.dims, *[()] * (leaf.meta.ndim - len(base.dims))]
    chosen = _dim(leaf.meta.shape, dims, axis, mesh)
    dims[chosen] = (*dims[chosen], axis)
    spec = P(*dims, partial=dict(base.partial))
    return Choice(leaf, check_spec(spec, leaf, mesh), f"dim {chosen}")


def _dim(shape: Sequence[int], dims: Sequence[tuple[str, ...]], axis: str, mesh: Mesh | None) -> int:
    """The dim that an axis shards beside those that shard dims already."""
    if mesh is None:
        return next((dim for dim, axes in enumerate(dims) if not axes), 0)
    even = [size % mesh.axis_size((*axes, axis)) == 0 for size, axes in zip(shape, dims, strict=True)]
    return max(range(len(shape)), key=lambda dim: (even[dim], not dims[dim], shape[dim], -dim))
