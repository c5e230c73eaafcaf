"""The hosts of the ranks of a distributed job, and what computes on them."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch

from spmd.collectives.distributed.agreement import gather
from spmd.collectives.transport.process_groups import backend
from spmd.core.mesh import Mesh
from spmd.job import launcher
from spmd.job.process import process_count, process_index


def gather_hosts(call: str, mesh: Mesh) -> tuple[int, ...]:
    """The number of each rank's host, from 0 in order of the ranks; a collective call of a distributed mesh.

    Args:
        call: the user's call that needs this, as for `gather`.
        mesh: the mesh.
    """
    return _numbers(gather(call, socket.gethostname(), mesh.ranks))


def assumed_hosts(mesh: Mesh) -> tuple[int, ...]:
    """As `gather_hosts` without communication, by the launcher's count of ranks on each host."""
    count = process_count()
    each = launcher.local_size(process_index(), count) or count
    return _numbers([rank // each for rank in mesh.ranks])


def _numbers(names: Sequence[Hashable]) -> tuple[int, ...]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def hosts_along(mesh: Mesh, axis: str, hosts: tuple[int, ...]) -> int:
    """On how many hosts the ranks of a group along an axis are, at most."""
    return max(len({hosts[rank] for rank in group}) for group in mesh.groups((axis,)))


def ranks_per_processor(mesh: Mesh, hosts: tuple[int, ...]) -> float:
    """How many ranks of this rank's host there are for each of its processors."""
    here = hosts[mesh.ranks.index(process_index())]
    return hosts.count(here) / (os.cpu_count() or 1)


def device_name(mesh: Mesh) -> str:
    """The GPU or the processor of this rank."""
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_name(mesh.device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe_ranks(mesh: Mesh, hosts: tuple[int, ...]) -> str:
    """Processes and hosts in words: `4 gloo processes on 1 host`."""
    count = len(set(hosts))
    processes = f"{mesh.size} {backend(mesh)} process{'' if mesh.size == 1 else 'es'}"
    return f"{processes} on {count} host{'' if count == 1 else 's'}"
