"""Measurements of the cost model's constants on a distributed mesh, by all ranks together.

All ranks compute at once, because those of one host share its processors and memory, and each of them measures. Each
time is that of several runs, and ranks agree on the median of theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from spmd.core.mesh import Mesh
from spmd.plan.machine.hosts import ranks_per_processor
from spmd.plan.machine.link import Link
from spmd.plan.machine.measure import DTYPES
from spmd.plan.machine.measure_links import measure_links
from spmd.plan.machine.reference import orders, predicted_seconds, product, references
from spmd.plan.machine.roofline import Roofline
from spmd.plan.machine.timed_runs import Run, agreed, apart, in_turns, medians, on_average, once, start

_FRESH = 2**27
"""Bytes that a rank on processors writes first: memory that is new to a process, or even to its host, is slow."""

_ROUNDS = 5
"""How often operators are timed."""

_SLOW = 2e-3
"""Seconds from which on a small product is not followed by larger ones, which a processor without units for the dtype
takes long for."""

_CPU_BYTES, _ACCELERATOR_BYTES = 2**21, 2**28
"""Bytes of each of `_OPERANDS` tensors, which together do not fit into caches."""

_OPERANDS = 16

_FLOAT = torch.float32.itemsize


@attrs.frozen
class RankConstants:
    """The constants of one rank among all, as those of `Machine`; the roofline is that of float32."""

    products: Mapping[str, float]
    roofline: Roofline
    operator_latency: float
    links: tuple[Link, ...]
    overlap: float


def measure_ranks(mesh: Mesh, hosts: tuple[int, ...]) -> RankConstants:
    """Measure the constants of the ranks of a distributed mesh; a collective call.

    Args:
        mesh: the mesh.
        hosts: the number of each rank's host.

    Raises:
        SpmdError: a rank failed, or never makes the call.
    """
    processors = mesh.device.type == "cpu"
    if processors:
        torch.ones(_FRESH, dtype=torch.uint8)
    programs = references(mesh.device)
    (sharing,) = agreed(mesh, {None: ranks_per_processor(mesh, hosts)}).values()
    # A core waits for what its products read.
    unit = Roofline(1.0, 1.0, memory_overlap=0.0 if processors else 1.0, write_allocate=processors)
    with torch.no_grad():
        start(mesh)
        products = {str(dtype): found for dtype in DTYPES if (found := _product(mesh, dtype, sharing)) is not None}
        seconds = agreed(mesh, products | _operators(mesh, programs, unit, sharing))
        links, overlap = measure_links(mesh, hosts, sharing)
    rates = {str(dtype): 1 / seconds[str(dtype)] for dtype in DTYPES if seconds.get(str(dtype), math.inf) < math.inf}
    traffic, latency = seconds["traffic"], seconds["operator"]
    transcendental = max(seconds["gelu"] - unit.traffic(_FLOAT, _FLOAT) * traffic, 0.0)

    def roofline(slower: float) -> Roofline:
        flops, bandwidth = rates[str(torch.float32)] / slower, 1 / traffic / slower
        return attrs.evolve(
            unit, flops=flops, memory_bandwidth=bandwidth, transcendental_seconds=transcendental * slower
        )

    predicted = sum(predicted_seconds(program, roofline(1.0), latency) for program in programs)
    slower = max(seconds["references"] / predicted, 1.0)
    products = {dtype: rate / slower for dtype, rate in rates.items()}
    return RankConstants(products, roofline(slower), latency, links, overlap)


def _product(mesh: Mesh, dtype: torch.dtype, sharing: float) -> float | None:
    """Seconds of a floating-point operation in matrix products; None if the device does not support the dtype."""
    small, large = orders(mesh.device)
    try:
        seconds = min(
            once(mesh, product(mesh.device, small, dtype)) for _ in range(2)
        )  # the first may set up a library
    except (RuntimeError, TypeError):
        return None
    if seconds > _SLOW:
        return seconds / (2 * small**3)
    return apart(mesh, product(mesh.device, large, dtype), sharing=sharing) / (2 * large**3)


def _operators(mesh: Mesh, programs: Sequence[Run], unit: Roofline, sharing: float) -> dict[str, float]:
    """Seconds of the reference programs, and of what their predicted times are made of, all in the same seconds.

    A product's are those of an operation, traffic's of a byte that passes between memory and compute units in an
    elementwise operator whose operands are in no cache, and a gelu's, by `tanh`, of an element. As programs have about
    as many views as other small operators, one in three is.

    Args:
        mesh: the mesh.
        programs: the reference programs.
        unit: a roofline which knows what counts as traffic.
        sharing: ranks for each processor.
    """
    _, order = orders(mesh.device)
    count = (_CPU_BYTES if mesh.device.type == "cpu" else _ACCELERATOR_BYTES) // _FLOAT
    operands = [torch.ones(count, device=mesh.device) for _ in range(_OPERANDS)]
    pairs = list(zip(operands[::2], operands[1::2], strict=True))
    small = torch.ones(8, 8, device=mesh.device)

    def add() -> None:
        for x, y in pairs:
            torch.add(x, y)

    runs: dict[str, Run] = {
        "references": lambda: [program() for program in programs],
        str(torch.float32): product(mesh.device, order),
        "traffic": add,
        "gelu": lambda: torch.nn.functional.gelu(operands[0], approximate="tanh"),
        "operator": lambda: (small.view(64) + small.view(64), small.t() @ small, small.sum(0)),
    }
    traffic = len(pairs) * count * unit.traffic(2 * _FLOAT, _FLOAT)
    units = {str(torch.float32): 2 * order**3, "traffic": traffic, "gelu": count, "operator": 3}
    found = medians(in_turns(mesh, runs, _ROUNDS, functools.partial(on_average, sharing=sharing)))
    return {key: seconds / units.get(key, 1) for key, seconds in found.items()}
