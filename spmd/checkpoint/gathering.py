"""A global tensor in the memory of one process, which writes it; the others hold their shards only."""

from __future__ import annotations

import torch
import torch.distributed as dist

from spmd.api.values.checkpointable import owned
from spmd.api.values.dtensor import DTensor
from spmd.checkpoint.processes import Processes
from spmd.collectives.distributed.checksums import as_bytes
from spmd.core.mesh import Runtime
from spmd.job.collective_scope import CollectiveScope


def gathered(leaf: torch.Tensor, name: str, processes: Processes) -> torch.Tensor | None:
    """The global tensor on the CPU in the first process, and None in the others, which send it their shards.

    The first process holds one shard of another beside it.

    Args:
        leaf: a DTensor that is not partial, or a plain tensor, which all processes hold.
        name: its name, for messages.
        processes: those of the leaf's mesh; all of them make the call.

    Raises:
        SpmdError: a process does not take part.
    """
    leaf = leaf.detach()
    if isinstance(leaf, DTensor) and leaf.mesh.runtime is Runtime.DISTRIBUTED:
        with CollectiveScope(f"{processes.call}: sending {name}", processes.ranks):
            return _to_first(leaf, processes)
    if not processes.is_first:
        return None
    return (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).cpu()


def _to_first(leaf: DTensor, processes: Processes) -> torch.Tensor | None:
    spec, mesh, first = leaf.spec, leaf.mesh, processes.ranks[0]
    here, coordinates = processes.ranks[processes.index], list(mesh.coordinates())
    whole = torch.empty(spec.meta.shape, dtype=spec.meta.dtype) if here == first else None
    for position in owned(spec, coordinates, "") if spec.meta.numel else ():
        source, coordinate = mesh.ranks[position], coordinates[position]
        shard = leaf.shards[0].cpu() if source == here else None
        if source != first and shard is not None:
            dist.send(as_bytes(shard), first, group=processes.group)
        elif whole is not None:
            if shard is None:
                shard = torch.empty(spec.local_shape(coordinate), dtype=spec.meta.dtype)
                dist.recv(as_bytes(shard), source, group=processes.group)
            whole[spec.local_slices(coordinate)] = shard
    return whole
