"""Every spec of a tensor, and shards that show whether they were moved as a spec says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from spmd.core.mesh import Mesh
from spmd.core.placement import Reduction, combine
from spmd.core.spec import DTensorSpec, P, TensorMeta


def every_spec(mesh: Mesh, meta: TensorMeta, reductions: Sequence[Reduction] = ("sum", "max")) -> list[DTensorSpec]:
    """Every spec of a tensor: each axis replicated, partial or on a dim, in every order of the axes of a dim."""
    found: dict[DTensorSpec, None] = {}
    choices = (None, "partial", *range(meta.ndim))
    for order in itertools.permutations(mesh.names):
        for places in itertools.product(choices, repeat=len(order)):
            placed = list(zip(order, places, strict=True))
            dims = [tuple(axis for axis, place in placed if place == dim) for dim in range(meta.ndim)]
            for op in reductions:
                partial = {axis: op for axis, place in placed if place == "partial"}
                found[DTensorSpec.make(mesh, P(*dims, partial=partial), meta)] = None
    return list(found)


def random_shards(spec: DTensorSpec, generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Shards of whole numbers on all ranks, and the tensor that they are; along partial axes no two parts cancel."""
    mesh, axes = spec.mesh, tuple(axis for axis, _ in spec.partial)
    parts = [
        torch.randint(-9, 10, spec.meta.shape, generator=generator).to(spec.meta.dtype)
        for _ in range(mesh.axis_size(axes))
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = combine(spec.partial[0][1], whole, part)
    shards = [parts[mesh.axis_index(where, axes)][spec.local_slices(where)].clone() for where in mesh.coordinates()]
    return shards, whole
