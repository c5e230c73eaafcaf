"""Conversion to and from torch's own DTensor, with the same shards: nothing is copied or communicated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from spmd.api.values.dtensor import DTensor, wrap
from spmd.collectives.transport.process_groups import process_group
from spmd.core.mesh import Mesh, Runtime, make_mesh
from spmd.core.placement import REDUCTIONS, Partial, Placement, Replicate, Shard
from spmd.core.spec import DTensorSpec, P, TensorMeta
from spmd.errors import MeshError, ShardingError

if TYPE_CHECKING:  # slow to import; who has such a DTensor has imported it
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement


def from_torch_dtensor(value: TorchDTensor) -> DTensor:
    """A `torch.distributed.tensor.DTensor` as one of `spmd`, on a mesh of the same axes; gradients do not flow through.

    Mesh dims without names become `dim_0`, `dim_1`, ... If several mesh dims shard one tensor dim, the earlier one is
    the major one in both libraries.

    Raises:
        MeshError: a device mesh that this process is not in.
        ShardingError: a placement that `spmd` does not have, such as `Partial("avg")`; or a tensor that autograd has
            computed.
    """
    device_mesh = value.device_mesh
    names = device_mesh.mesh_dim_names or tuple(f"dim_{dim}" for dim in range(device_mesh.ndim))
    axes = dict(zip(names, device_mesh.shape, strict=True))
    ranks = device_mesh.mesh.flatten().tolist()
    mesh = make_mesh(axes, runtime="distributed", device=device_mesh.device_type, ranks=ranks)
    mesh.require_processes()
    placements = [_from_torch(placement, value) for placement in value.placements]
    meta = TensorMeta(tuple(value.shape), value.dtype)
    spec = DTensorSpec.make(mesh, P.from_placements(placements, mesh), meta)
    if torch.is_grad_enabled() and value.grad_fn is not None:
        raise ShardingError(
            f"The torch DTensor of shape {list(value.shape)} was computed by autograd, and its gradient would be lost. "
            "Pass value.detach(), or let gradients flow by spmd.DTensor.from_local(value.to_local(), mesh, spec)."
        )
    local = value.to_local().detach()
    return wrap(spec, (local.wait() if isinstance(local, AsyncCollectiveTensor) else local,))


def to_torch_dtensor(value: DTensor) -> TorchDTensor:
    """A DTensor as a `torch.distributed.tensor.DTensor`, on a device mesh of the same axes.

    This is a collective call: process groups for the axes are made if they do not exist.

    Raises:
        MeshError: a mesh that is not distributed, or whose processes are not in ascending order.
        ShardingError: several axes shard a dim in another order than that of the mesh; torch has no placement for that.
    """
    if value.mesh.runtime is not Runtime.DISTRIBUTED:
        runtime = value.mesh.runtime.value
        raise MeshError(f"torch's DTensor needs a distributed mesh (got {value.mesh}, which is {runtime}).")
    for dim, axes in enumerate(value.spec.dims):
        ordered = tuple(name for name in value.mesh.names if name in axes)
        if ordered != axes:
            dims = (*value.spec.dims[:dim], ordered, *value.spec.dims[dim + 1 :])
            raise ShardingError(
                f"torch has no placement for dim {dim} of {value.spec}, sharded in another order than that of "
                f"{value.mesh}. Pass value.redistribute({P(*dims, partial=dict(value.spec.partial))!r})."
            )
    from torch.distributed.tensor import DTensor as TorchDTensor

    return TorchDTensor.from_local(
        value.to_local(),
        device_mesh(value.mesh),
        [_to_torch(placement) for placement in value.placements],
        run_check=False,
        shape=value.shape,
        stride=torch.empty(value.shape, device="meta").stride(),
    )


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Torch's device mesh for a distributed mesh, with the process groups of programs on it; a collective call."""
    from torch.distributed.device_mesh import DeviceMesh

    for name in mesh.names:
        along = mesh[name].ranks
        if list(along) != sorted(along):
            raise MeshError(
                f"torch's groups have their processes in ascending order (got {along} along {name!r} of {mesh}). Make "
                "the mesh with ascending ranks."
            )
    groups = [process_group(mesh, (name,)) for name in mesh.names]
    ranks = torch.tensor(mesh.ranks).view(mesh.sizes)
    return DeviceMesh.from_group(groups, mesh.device.type, mesh=ranks, mesh_dim_names=mesh.names)


def _from_torch(placement: TorchPlacement, value: TorchDTensor) -> Placement:
    from torch.distributed.tensor import placement_types as theirs

    if type(placement) is theirs.Shard:
        return Shard(placement.dim)
    if type(placement) is theirs.Replicate:
        return Replicate()
    if type(placement) is theirs.Partial and placement.reduce_op in REDUCTIONS:
        return Partial(placement.reduce_op)  # type: ignore[arg-type]
    raise ShardingError(
        f"spmd has no placement {placement!r} (of a torch DTensor of shape {list(value.shape)}). Redistribute it to "
        f"Shard, Replicate or Partial of {', '.join(REDUCTIONS)} first."
    )


def _to_torch(placement: Placement) -> TorchPlacement:
    from torch.distributed.tensor import placement_types as theirs

    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    return theirs.Replicate() if isinstance(placement, Replicate) else theirs.Partial(placement.op)
