"""Measurements of the cost model's constants: matrix products, copies and collectives on a virtual mesh.

Sizes are fixed; each time is the median of several runs.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch

from spmd.collectives import virtual
from spmd.collectives.primitives import ALL_REDUCE
from spmd.core.mesh import Mesh, Runtime
from spmd.errors import MeshError
from spmd.plan.machine.link import Link

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CPU_ORDER, _ACCELERATOR_ORDER = 512, 8192
"""Orders of square matrices: one that fits into a core's cache, and one that is large enough for an accelerator."""

_CPU_COPY, _ACCELERATOR_COPY = 2**27, 2**30
"""Bytes to copy: more than fit into caches."""

_SMALL, _LARGE = 2**10, 2**25
"""Bytes of the operands of a collective, summed over all ranks."""


def measure_products(mesh: Mesh) -> dict[torch.dtype, float]:
    """Floating-point operations per second of a rank in matrix products, by dtype, where the device supports it.

    Raises:
        MeshError: the mesh is not virtual.
    """
    _check_runs(mesh)
    order = _CPU_ORDER if mesh.device.type == "cpu" else _ACCELERATOR_ORDER
    rates = {}
    for dtype in DTYPES:
        try:
            matrix = torch.ones(order, order, dtype=dtype, device=mesh.device)
            result = matrix @ matrix
        except (RuntimeError, TypeError):
            continue
        seconds = median_seconds(lambda a=matrix, out=result: torch.mm(a, a, out=out))  # type: ignore[misc]
        rates[dtype] = 2 * order**3 / seconds / mesh.size
    return rates


def measure_copies(mesh: Mesh) -> float:
    """Bytes per second that a rank reads and writes in a copy, reads and writes added up.

    Raises:
        MeshError: the mesh is not virtual.
    """
    _check_runs(mesh)
    count = _CPU_COPY if mesh.device.type == "cpu" else _ACCELERATOR_COPY
    source = torch.ones(count, dtype=torch.uint8, device=mesh.device)
    target = torch.empty_like(source)
    return 2 * count / median_seconds(lambda: target.copy_(source)) / mesh.size


def measure_link(mesh: Mesh, axis: str) -> Link:
    """Bandwidth and latency of collectives along a mesh axis: the line through the times of two all_reduces.

    Raises:
        MeshError: the mesh is not virtual.
    """
    _check_runs(mesh)
    sent, seconds = [], []
    for total in (_SMALL, _LARGE):
        count = max(total // 4 // mesh.size, 1)
        sent.append(ALL_REDUCE.ring_bytes(mesh.axis_size(axis), 4 * count))
        seconds.append(median_seconds(_all_reduce(mesh, axis, count)))
    slope, intercept = statistics.linear_regression(sent, seconds)
    if slope <= 0:  # noise: use the achieved bandwidth, latency included
        return Link(axis, ALL_REDUCE.name, min(seconds), sent[-1] / seconds[-1])
    return Link(axis, ALL_REDUCE.name, max(intercept, 0.0), 1 / slope)


def memory_of(mesh: Mesh, sharing: int) -> int | None:
    """Bytes of memory of a rank; None if the system does not report them.

    Args:
        mesh: a mesh that runs.
        sharing: how many ranks have the same host; on GPUs, processes do not share.
    """
    if mesh.device.type == "cuda":
        total = int(torch.cuda.get_device_properties(mesh.device).total_memory)
        return total if mesh.runtime is Runtime.DISTRIBUTED else total // sharing
    if mesh.device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharing


def median_seconds(run: Callable[[], object]) -> float:
    """The median time in seconds of several calls of `run`, including the device's work."""
    from torch.utils.benchmark import Timer  # imported here because it is slow to import

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.1).median


def _all_reduce(mesh: Mesh, axis: str, count: int) -> Callable[[], object]:
    """A function that runs an all_reduce along an axis, of `count` float32 numbers on every rank."""
    shards = [torch.ones(count, device=mesh.device) for _ in range(mesh.size)]
    return lambda: virtual.run(ALL_REDUCE.op, mesh, [((shard, "sum", [axis]), {}) for shard in shards])


def _check_runs(mesh: Mesh) -> None:
    if mesh.runtime is not Runtime.VIRTUAL:
        raise MeshError(
            f"{mesh} is {mesh.runtime.value}: nothing runs on it that could be measured. Use "
            "make_mesh(..., runtime='virtual'), or a machine with known constants: Machine.preset('h100_nvlink')."
        )
