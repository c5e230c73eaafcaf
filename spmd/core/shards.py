"""A global tensor as the shards of all ranks, and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from spmd.core.placement import combine
from spmd.core.spec import DTensorSpec


def split(parts: Sequence[torch.Tensor], spec: DTensorSpec) -> tuple[torch.Tensor, ...]:
    """The shards of all ranks in rank order; views.

    Args:
        parts: the tensors whose reduction is the global tensor: one for each index along the partial axes, in
            row-major order; of a spec without partial axes, the global tensor alone.
        spec: of the global tensor.

    >>> from spmd.core.mesh import make_mesh
    >>> from spmd.core.spec import P, TensorMeta
    >>> x = torch.arange(3)
    >>> spec = DTensorSpec.make(make_mesh({"data": 2}, runtime="virtual"), P("data"), TensorMeta.of(x))
    >>> split([x], spec)
    (tensor([0, 1]), tensor([2]))
    """
    axes = [axis for axis, _ in spec.partial]
    return tuple(
        parts[spec.mesh.axis_index(coordinate, axes)][spec.local_slices(coordinate)]
        for coordinate in spec.mesh.coordinates()
    )


def reduced(
    shards: Sequence[torch.Tensor], spec: DTensorSpec, *, replicas: bool = True
) -> Iterator[tuple[int, tuple[slice, ...], torch.Tensor]]:
    """The shards reduced over the partial axes, with the places that they fill in the global tensor.

    Args:
        shards: of all ranks, in rank order.
        spec: of the global tensor.
        replicas: whether to give every replica, or only the first.

    Yields:
        The first rank that holds it, its slices, and the value, reduced in rank order.
    """
    mesh, reductions = spec.mesh, dict(spec.partial)
    sharded = {axis for axes in spec.dims for axis in axes}
    copies = [mesh.axis_position(axis) for axis in mesh.names if axis not in sharded and axis not in reductions]
    for group in mesh.groups(tuple(reductions)):
        coordinate = mesh.coordinate(group[0])
        if not replicas and any(coordinate[position] for position in copies):
            continue
        held = [shards[rank] for rank in group]
        value = functools.reduce(lambda left, right: combine(spec.partial[0][1], left, right), held)
        yield group[0], spec.local_slices(coordinate), value


def join(shards: Sequence[torch.Tensor], spec: DTensorSpec) -> torch.Tensor:
    """The global tensor of the shards of all ranks, the inverse of `split`; a new tensor. Replicas must be equal."""
    full = torch.empty(spec.meta.shape, dtype=spec.meta.dtype, device=spec.mesh.device)
    for _, slices, value in reduced(shards, spec, replicas=False):
        full[slices].copy_(value)
    return full
