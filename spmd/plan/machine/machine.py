"""What a machine costs: the constants behind predicted times, and those of some machines that one can buy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import attrs
import torch

from spmd.core.mesh import Mesh
from spmd.errors import PlanError
from spmd.plan.machine.measure import measure_copies, measure_link, measure_products, memory_of


def _by_name(rates: Mapping[Any, float] | tuple[tuple[Any, float], ...]) -> tuple[tuple[str, float], ...]:
    items = rates.items() if isinstance(rates, Mapping) else rates
    return tuple(sorted((str(name).removeprefix("torch."), rate) for name, rate in items))


@attrs.frozen
class Machine:
    """Cost constants of one rank and its links; the defaults resemble an H100 in one node.

    Args:
        flops: floating-point operations a second, in dtypes that `dtype_flops` does not name.
        memory_bandwidth: bytes a second between the rank's memory and its compute units.
        link_bandwidth: bytes a second that a rank can send.
        axis_bandwidth: bytes a second along mesh axes whose links differ from `link_bandwidth`, by axis name. Names
            that a mesh lacks mean nothing to it, so that what was measured on one mesh serves others: mind their
            spelling.
        latency: seconds that each collective takes besides its bytes. The default is that of collectives in buckets;
            a single small one takes ten times as long.
        axis_latency: seconds along mesh axes whose latency differs, by axis name.
        dtype_flops: floating-point operations a second, by dtype or its name: `{"bfloat16": 989.5e12}`. Complex dtypes
            have the rate of their parts.
        memory_capacity: bytes that a rank can hold, None if unknown. A plan is held to them only where they are given
            as its memory limit.

    Raises:
        PlanError: a constant that is not positive (a latency may be zero), or a dtype that torch does not have.
    """

    flops: float = 5e14
    memory_bandwidth: float = 3e12
    link_bandwidth: float = 4e11
    axis_bandwidth: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_by_name)
    latency: float = 0.5e-6
    axis_latency: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_by_name)
    dtype_flops: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_by_name)
    memory_capacity: int | None = attrs.field(default=None, converter=attrs.converters.optional(int))

    def __attrs_post_init__(self) -> None:
        rates = {"flops": self.flops, "memory_bandwidth": self.memory_bandwidth, "link_bandwidth": self.link_bandwidth}
        rates |= {f"axis_bandwidth[{axis!r}]": rate for axis, rate in self.axis_bandwidth}
        rates |= {f"dtype_flops[{dtype!r}]": rate for dtype, rate in self.dtype_flops}
        rates |= {} if self.memory_capacity is None else {"memory_capacity": self.memory_capacity}
        for name, rate in rates.items():
            if not rate > 0:
                raise PlanError(f"Machine {name} must be positive (got {rate!r}).")
        latencies = {"latency": self.latency} | {f"axis_latency[{axis!r}]": time for axis, time in self.axis_latency}
        for name, time in latencies.items():
            if not time >= 0:
                raise PlanError(f"Machine {name} must not be negative (got {time!r}).")
        for dtype, _ in self.dtype_flops:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise PlanError(f"Machine dtype_flops must name dtypes of torch, as 'bfloat16' (got {dtype!r}).")

    @classmethod
    def preset(cls, name: str, *, tf32: bool = False, **changes: Any) -> Machine:
        """A machine that one can buy: see `PRESETS` for their names and where their constants come from.

        Args:
            name: one of `PRESETS`.
            tf32: whether float32 products run in TF32, as under `torch.set_float32_matmul_precision("high")`.
            changes: constants in place of the preset's, such as the links of one mesh axis.

        Raises:
            PlanError: an unknown name, or `tf32` where there is no such unit.

        >>> Machine.preset("h100_nvlink", axis_bandwidth={"data": 5e10}).axis_bandwidth
        (('data', 50000000000.0),)
        """
        if name not in PRESETS:
            raise PlanError(f"Unknown machine {name!r}. Expected one of {', '.join(PRESETS)}, or give constants.")
        if tf32 and name not in TF32_FLOPS:
            raise PlanError(f"Machine {name!r} has no TF32 units; {', '.join(TF32_FLOPS)} have. Leave out tf32=True.")
        found = PRESETS[name]
        if tf32:
            changes = {"dtype_flops": {**dict(found.dtype_flops), "float32": TF32_FLOPS[name]}} | changes
        return attrs.evolve(found, **changes)

    @classmethod
    def measure(cls, mesh: Mesh) -> Machine:
        """Measure the constants of a mesh that runs, in some seconds.

        The ranks of a virtual mesh take turns in one process: each has its part of the process's arithmetic, memory
        bandwidth and memory, and a collective takes as long as it takes for all ranks.

        Raises:
            MeshError: a mesh that does not run.
        """
        products = {str(dtype): rate for dtype, rate in measure_products(mesh).items()}
        links = {axis: measure_link(mesh, axis) for axis, size in mesh.axes.items() if size > 1}
        copies = measure_copies(mesh)
        return cls(
            flops=products["torch.float32"],
            dtype_flops=products,
            memory_bandwidth=copies,
            memory_capacity=memory_of(mesh),
            link_bandwidth=min((link.bandwidth for link in links.values()), default=copies),
            axis_bandwidth={axis: link.bandwidth for axis, link in links.items()},
            latency=max((link.latency for link in links.values()), default=0.0),
            axis_latency={axis: link.latency for axis, link in links.items()},
        )

    def rate(self, dtype: torch.dtype | None = None) -> float:
        """Floating-point operations a second in a dtype, or in those that have no rate of their own."""
        return self._rates.get(dtype, self.flops)

    def compute_seconds(self, flops: float, bytes: float, dtype: torch.dtype | None = None) -> float:
        """Roofline time of an operator (Williams et al., 2009): the longer of its arithmetic and its memory traffic.

        Args:
            flops: its floating-point operations.
            bytes: what it reads and writes.
            dtype: what it computes in.
        """
        return max(flops / self.rate(dtype), bytes / self.memory_bandwidth)

    def collective_seconds(self, axes: tuple[str, ...], bytes: float) -> float:
        """Time of a collective over `axes` in which each rank sends `bytes`: that of their slowest links."""
        latency = max(self._latencies.get(axis, self.latency) for axis in axes)
        return latency + bytes / min(self._bandwidths.get(axis, self.link_bandwidth) for axis in axes)

    @cached_property
    def _rates(self) -> dict[torch.dtype | None, float]:
        rates: dict[torch.dtype | None, float] = {getattr(torch, name): rate for name, rate in self.dtype_flops}
        parts = ((dtype.to_complex(), rate) for dtype, rate in rates.items() if dtype in _PARTS_OF_COMPLEX)
        return {**dict(parts), **rates}

    @cached_property
    def _bandwidths(self) -> dict[str, float]:
        return dict(self.axis_bandwidth)

    @cached_property
    def _latencies(self) -> dict[str, float]:
        return dict(self.axis_latency)


_PARTS_OF_COMPLEX = (torch.float16, torch.float32, torch.float64)


def _hopper(memory_bandwidth: float, memory_capacity: int) -> Machine:
    """H100 and H200 differ in their memory."""
    rates = {"float64": 67e12, "float32": 67e12, "float16": 989.5e12, "bfloat16": 989.5e12}
    rates |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1979e12)
    return Machine(
        flops=67e12,
        dtype_flops=rates,
        memory_bandwidth=memory_bandwidth,
        memory_capacity=memory_capacity,
        link_bandwidth=450e9,
    )


_A100_RATES = {"float64": 19.5e12, "float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12}

_EPYC_CYCLES = 96 * 2.4e9
"""Cores times base clock."""

PRESETS: Mapping[str, Machine] = MappingProxyType(
    {
        "h100_nvlink": _hopper(memory_bandwidth=3.35e12, memory_capacity=80 * 10**9),
        "h200": _hopper(memory_bandwidth=4.8e12, memory_capacity=141 * 10**9),
        "a100": Machine(
            flops=19.5e12,
            dtype_flops=_A100_RATES,
            memory_bandwidth=2.039e12,
            memory_capacity=80 * 10**9,
            link_bandwidth=300e9,
        ),
        "tpu_v5p": Machine(
            flops=459e12,
            dtype_flops=dict.fromkeys(("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"), 459e12),
            memory_bandwidth=2.765e12,
            memory_capacity=95 * 2**30,
            link_bandwidth=200e9,
        ),
        "cpu": Machine(
            flops=32 * _EPYC_CYCLES,
            dtype_flops={"float64": 16 * _EPYC_CYCLES, "float32": 32 * _EPYC_CYCLES, "bfloat16": 64 * _EPYC_CYCLES},
            memory_bandwidth=460.8e9,
            memory_capacity=768 * 10**9,
            link_bandwidth=12.5e9,
            latency=5e-6,
        ),
    }
)
"""Machines by name, at the peaks that their makers state: predicted times are lower bounds. `Machine.measure` finds
what is reached.

Rates are those of dense products, half of what a sheet states with sparsity; dtypes without units of their own have
float32's. Bandwidths of links are those of one
direction, half of what a sheet states for both. Latencies are those of collectives in buckets, as the default is.

- `h100_nvlink`, `h200`: SXM, NVIDIA H100 and H200 Tensor Core GPU data sheets. float64 by tensor cores; float32 in full
  precision, as torch's default is. NVLink 4 at 900 GB/s in both directions, which holds inside a node.
- `a100`: SXM 80 GB, NVIDIA A100 Tensor Core GPU data sheet. As above; NVLink 3 at 600 GB/s in both directions.
- `tpu_v5p`: Google Cloud's page on TPU v5p. float32 runs in bfloat16 passes and is priced as one. 1,200 GB/s in both
  directions over six links; a mesh axis is taken to be one of the torus's three, with two links.
- `cpu`: a socket a rank, AMD EPYC 9654 data sheet: 96 cores at 2.4 GHz, twelve channels of DDR5-4800, 64 GB on each.
  A Zen 4 core does 16 float64, 32 float32 or 64 bfloat16 operations a cycle. Sockets are taken to be linked by
  Ethernet of 100 Gb/s, at ten times the latency of the others.
"""

TF32_FLOPS: Mapping[str, float] = MappingProxyType({"h100_nvlink": 494.5e12, "h200": 494.5e12, "a100": 156e12})
"""Rates of float32 products in TF32, from the same sheets."""
