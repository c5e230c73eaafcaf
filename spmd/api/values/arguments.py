"""The checks of arguments of a function under `jit`."""

from __future__ import annotations

from typing import Any

import torch

from spmd.api.values.distribute import check_placeable
from spmd.api.values.dtensor import DTensor
from spmd.core.mesh import Mesh
from spmd.core.pytree import leaf_meta
from spmd.core.spec import DTensorSpec
from spmd.errors import MeshError, ShardingError
from spmd.tracing.source import user_source, where


def check_argument(leaf: Any, spec: DTensorSpec, name: str) -> None:
    """Check that an argument can be placed by a spec of `in_specs`.

    Raises:
        MeshError: a DTensor on another mesh.
        ShardingError: a DTensor with another spec, or no dense tensor with data.
    """
    if not isinstance(leaf, DTensor):
        if isinstance(leaf, torch.Tensor) and leaf.is_meta:
            raise ShardingError(
                f"{name} {spec.meta} is a meta tensor, which has no data. Meta tensors serve .trace, .plan and .lower. "
                "To call the function, load or compute the values first."
            )
        check_placeable(leaf, spec.mesh, name)
        return
    if leaf.mesh != spec.mesh:
        raise MeshError(
            f"{name} {spec.meta} is on {leaf.mesh}, but the function runs on {spec.mesh}. Place it with "
            "spmd.distribute(value.full_tensor(), spec, mesh)."
        )
    if leaf.spec != spec:
        raise _spec_mismatch(leaf.spec, spec, name)


def own_spec(leaf: Any, mesh: Mesh, where: str) -> DTensorSpec:
    """The spec of an argument for which none is given: a DTensor has one, a plain tensor is replicated.

    A DTensor on another mesh, which is refused later, counts as replicated.

    Raises:
        ShardingError: the argument is no tensor; `where` names it.
    """
    if isinstance(leaf, DTensor) and leaf.mesh == mesh:
        return leaf.spec
    return DTensorSpec.replicated(mesh, leaf_meta(leaf, where))


def _spec_mismatch(held: DTensorSpec, wanted: DTensorSpec, name: str) -> ShardingError:
    differences = [
        f"dim {dim} (size {size}) has axes {given} in the value given and {asked} in in_specs"
        for dim, (size, given, asked) in enumerate(zip(wanted.meta.shape, held.dims, wanted.dims, strict=True))
        if given != asked
    ]
    if held.partial != wanted.partial:
        differences.append(f"it is partial over {dict(held.partial)} and in_specs says {dict(wanted.partial)}")
    return ShardingError(
        f"{name} {wanted.meta} has spec {held.pspec!r} but in_specs says {wanted.pspec!r}: {'; '.join(differences)}.\n"
        f"  {where(user_source())}. Pass value.redistribute({wanted.pspec!r}), or change in_specs to {held.pspec!r}."
    )
