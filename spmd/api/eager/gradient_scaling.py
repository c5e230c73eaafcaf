"""Gradients that `torch.amp.GradScaler` unscales: each rank its shards, and one number says whether all are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.api.values.dtensor import DTensor, wrap
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, P, TensorMeta


def unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Run `_amp_foreach_non_finite_check_and_unscale_`, with one reduction for each mesh.

    Args:
        gradients: DTensors or plain tensors, which are multiplied in place.
        found_inf: a plain number, which becomes 1 on all ranks if a gradient of any is not finite.
        inverse_scale: the plain number by which they are multiplied.
    """
    if plain := [gradient for gradient in gradients if not isinstance(gradient, DTensor)]:
        torch._amp_foreach_non_finite_check_and_unscale_(plain, found_inf, inverse_scale)
    placed = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    for mesh in dict.fromkeys(gradient.mesh for gradient in placed):
        _unscale_on(mesh, [gradient for gradient in placed if gradient.mesh == mesh], found_inf, inverse_scale)


def _unscale_on(mesh: Mesh, gradients: Sequence[DTensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    flags, scaled = [], []
    for rank in range(len(mesh.held_coordinates)):
        flag = found_inf.to(gradients[0].device, copy=True).reshape(())
        shards = [gradient._shards[rank].clone() for gradient in gradients]
        torch._amp_foreach_non_finite_check_and_unscale_(shards, flag, inverse_scale.to(flag.device))
        flags.append(flag)
        scaled.append(shards)
    spec = DTensorSpec.make(mesh, P(partial=dict.fromkeys(mesh.names, "max")), TensorMeta.of(flags[0]))
    found_inf.copy_(wrap(spec, tuple(flags)).redistribute(P())._shards[0].reshape(found_inf.shape))
    for gradient, shards_of_ranks in zip(gradients, zip(*scaled, strict=True), strict=True):
        gradient.copy_(wrap(gradient._spec, shards_of_ranks, gradient._strides))
