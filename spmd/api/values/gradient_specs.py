"""The spec of which the gradients of a tensor's shards are shards: `grad_placements`, and what holds without them."""

from __future__ import annotations

from spmd.collectives.step import without_trivial
from spmd.core.pytree import SpecLike, make_spec
from spmd.core.spec import DTensorSpec
from spmd.errors import ShardingError


def gradient_spec(spec: DTensorSpec, given: SpecLike | None) -> DTensorSpec | None:
    """The spec of which the gradients of a tensor's shards are shards, as `grad_placements` says it; None if it does
    not, and the tensor is partial in another reduction than a sum, whose parts have no gradient.

    Raises:
        ShardingError: it does not fit the tensor, or shards other dims, so that gradients would have other shapes.
    """
    if given is None:
        return spec.complete if all(op == "sum" for _, op in spec.partial) else None
    found, mesh = make_spec(spec.mesh, given, spec.meta, where="grad_placements of"), spec.mesh
    if [without_trivial(mesh, axes) for axes in found.dims] != [without_trivial(mesh, axes) for axes in spec.dims]:
        raise ShardingError(
            f"grad_placements must shard the dims of {spec} as it is, because a gradient has the shape of its shard "
            f"(got {found.pspec!r}). Only the other axes have a choice: replicated, or partial."
        )
    if any(op != "sum" for _, op in found.partial):
        raise ShardingError(f"grad_placements must be partial in sums (got {found.pspec!r}): gradients are added.")
    return found


def gradient_of_parts(spec: DTensorSpec, gradient: DTensorSpec | None) -> DTensorSpec:
    """The spec of the gradient of parts; ShardingError if there is none."""
    if gradient is None:
        raise ShardingError(
            f"A gradient of the shards of a DTensor {spec} is needed. Only sums have one: reduce it in another way, "
            "detach it, or say by grad_placements=... what ranks compute."
        )
    return gradient
