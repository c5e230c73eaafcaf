"""What torch's DTensor sends for a redistribution: its collectives, run on a fake process group and counted.

Torch runs its own code for one rank of a job that does not exist (the backend `fake`), and every collective that it
calls is priced by the same ring model as ours. All meshes of several axes are flattened beforehand, which lets torch
join steps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec as TorchSpec
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor, use_min_cost_redistribution_plan
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from proofs.redistribution.optimum import Cost
from spmd.collectives.cheapest import LAUNCH_BYTES
from spmd.collectives.primitive import Collective
from spmd.collectives.primitives import ALL_TO_ALL, KINDS
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec


@contextlib.contextmanager
def fake_mesh(mesh: Mesh) -> Iterator[DeviceMesh]:
    """Torch's mesh of the same axes in a job of fake ranks, of which this process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    try:
        made = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
        for count in range(2, len(mesh.names) + 1):
            for axes in itertools.combinations(mesh.names, count):
                made[axes]._flatten("_".join(axes))
        yield made
    finally:
        dist.destroy_process_group()


class _Counter(TorchDispatchMode):
    """Counts collectives, and the bytes that a rank sends in them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.count = 0.0, 0

    def add(self, collective: Collective, ranks: int, nbytes: float) -> None:
        if ranks > 1:
            self.bytes, self.count = self.bytes + collective.ring_bytes(ranks, nbytes), self.count + 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("_c10d_functional::")
        if collective := next((one for kind, one in KINDS.items() if name.startswith(kind)), None):
            ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
            self.add(collective, ranks, args[0].nbytes)
        return made

    def exchange(self, x: torch.Tensor, gathered: int, split: int, mesh: DeviceMesh, axis: int) -> torch.Tensor:
        """What torch does by an all_to_all on a GPU; on a CPU it would gather instead."""
        ranks = mesh.size(axis)
        self.add(ALL_TO_ALL, ranks, x.nbytes)
        return x.repeat_interleave(ranks, gathered).chunk(ranks, split)[0].contiguous()


def torch_cost(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec, *, min_cost: bool = False) -> Cost | None:
    """The cost of torch's redistribution; None if torch refuses it.

    Args:
        mesh: a mesh of `fake_mesh`.
        source, target: specs with even shards.
        min_cost: whether torch is asked for its plan of least cost, which is not its default.
    """
    before, after = _spec(mesh, source), _spec(mesh, target)
    shard = torch.zeros(source.local_shape((0,) * len(source.mesh.names)), dtype=source.meta.dtype)
    counter = _Counter()
    chosen = use_min_cost_redistribution_plan() if min_cost else contextlib.nullcontext()
    patched = mock.patch.object(placement_types, "shard_dim_alltoall", counter.exchange)
    try:
        with chosen, patched, counter:
            found = redistribute_local_tensor(shard, before, after)
    except (RuntimeError, AssertionError, NotImplementedError):
        return None
    assert tuple(found.shape) == target.local_shape((0,) * len(source.mesh.names))
    return Cost(counter.bytes + LAUNCH_BYTES * counter.count, counter.count, counter.bytes)


def _spec(mesh: DeviceMesh, spec: DTensorSpec) -> TorchSpec:
    """Torch's spec: placements, and the order of the axes of each dim."""
    names, shape = spec.mesh.names, spec.meta.shape
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placements: list[Any] = [Replicate()] * len(names)
    for axis, op in spec.partial:
        placements[names.index(axis)] = Partial(op)
    order = []
    for dim, axes in enumerate(spec.dims):
        positions = tuple(names.index(axis) for axis in axes)
        for position in positions:
            placements[position] = Shard(dim)
        if positions:
            order.append(ShardOrderEntry(tensor_dim=dim, mesh_dims=positions))
    meta = TensorMeta(torch.Size(shape), strides, spec.meta.dtype)
    return TorchSpec(mesh, tuple(placements), meta, shard_order=tuple(order), use_strided_shard_as_shard_order=False)
