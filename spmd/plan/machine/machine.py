"""The machine model: the constants behind predicted times, and presets for some commercial machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import attrs
import torch

from spmd.core.mesh import Mesh, Runtime
from spmd.core.quantity import size_text, time_text
from spmd.errors import PlanError
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.plan.machine.hosts import describe_ranks, gather_hosts
from spmd.plan.machine.link import Link
from spmd.plan.machine.measure import measure_copies, measure_link, measure_products, memory_of
from spmd.plan.machine.measure_ranks import measure_ranks
from spmd.plan.machine.roofline import Roofline

GIVEN = "given"
"""The origin of a machine that says no other."""


def _by_name(rates: Mapping[Any, float] | tuple[tuple[Any, float], ...]) -> tuple[tuple[str, float], ...]:
    items = rates.items() if isinstance(rates, Mapping) else rates
    return tuple(sorted((str(name).removeprefix("torch."), rate) for name, rate in items))


def _rounded(value: float) -> float:
    """A measured number with two significant digits: the others are noise."""
    return float(f"{value:.1e}")


def _links(links: Iterable[Link | Mapping[str, Any]]) -> tuple[Link, ...]:
    return tuple(sorted(link if isinstance(link, Link) else Link(**link) for link in links))


@attrs.frozen
class Machine:
    """Cost constants of one rank and its links; the defaults resemble an H100 in one node.

    Args:
        flops: floating-point operations per second, in dtypes that `dtype_flops` does not name.
        memory_bandwidth: bytes per second between the rank's memory and its compute units.
        link_bandwidth: bytes per second that a rank can send.
        axis_bandwidth: bytes per second along mesh axes whose links differ from `link_bandwidth`, by axis name. Names
            that are not axes of the mesh are ignored, so that one machine serves several meshes; so are misspelled
            names.
        latency: seconds that each collective takes in addition to the transfer of its bytes. The default assumes
            collectives in buckets; a single small one takes ten times as long.
        axis_latency: seconds along mesh axes whose latency differs from `latency`, by axis name.
        dtype_flops: floating-point operations per second, by dtype or its name: `{"bfloat16": 989.5e12}`. A complex
            dtype has the rate of its real parts.
        memory_capacity: bytes of a rank's memory; None if unknown. Plans are limited by `Request.memory_limit` only.
        operator_latency: seconds that each operator takes in addition to its roofline time.
        transcendental_seconds: seconds of one evaluation of a transcendental function in an elementwise operator, such
            as the `tanh` in gelu; 0 on GPUs, which have units for them.
        write_allocate: whether a new result passes between memory and compute units twice, as on processors: they read
            the cache lines that they write, and clear new pages. What is updated in place has been read anyway.
        fuses: whether values between pointwise operators stay out of memory, as in programs that a compiler has fused.
        origin: where the constants come from, in words; it makes no machine differ from another.
        links: constants of collectives of one kind along one mesh axis, in place of those of the axis.
        overlap: the part of a collective's time that can pass beside computation: 1 for links that need no processor
            time, 0 if ranks compute nothing while they communicate.
        memory_overlap: the part of an operator's memory traffic that can pass beside its arithmetic: 1 as on a
            roofline, 0 if the one follows the other.

    Raises:
        PlanError: a constant is not positive (latencies and other times may be zero), `overlap` or `memory_overlap` is
            outside of 0..1, or torch does not have a dtype.
    """

    flops: float = 5e14
    memory_bandwidth: float = 3e12
    link_bandwidth: float = 4e11
    axis_bandwidth: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_by_name)
    latency: float = 0.5e-6
    axis_latency: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_by_name)
    dtype_flops: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_by_name)
    memory_capacity: int | None = attrs.field(default=None, converter=attrs.converters.optional(int))
    operator_latency: float = 0.0
    transcendental_seconds: float = 0.0
    overlap: float = 1.0
    memory_overlap: float = 1.0
    links: tuple[Link, ...] = attrs.field(default=(), converter=_links)
    write_allocate: bool = False
    fuses: bool = True
    origin: str = attrs.field(default="", eq=False)

    def __attrs_post_init__(self) -> None:
        rates = {"flops": self.flops, "memory_bandwidth": self.memory_bandwidth, "link_bandwidth": self.link_bandwidth}
        rates |= {f"axis_bandwidth[{axis!r}]": rate for axis, rate in self.axis_bandwidth}
        rates |= {f"dtype_flops[{dtype!r}]": rate for dtype, rate in self.dtype_flops}
        rates |= {} if self.memory_capacity is None else {"memory_capacity": self.memory_capacity}
        for name, rate in rates.items():
            if not rate > 0:
                raise PlanError(f"Machine {name} must be positive (got {rate!r}).")
        latencies = {"latency": self.latency, "operator_latency": self.operator_latency}
        latencies["transcendental_seconds"] = self.transcendental_seconds
        latencies |= {f"axis_latency[{axis!r}]": time for axis, time in self.axis_latency}
        for name, time in latencies.items():
            if not time >= 0:
                raise PlanError(f"Machine {name} must not be negative (got {time!r}).")
        for name, part in {"overlap": self.overlap, "memory_overlap": self.memory_overlap}.items():
            if not 0 <= part <= 1:
                raise PlanError(f"Machine {name} must be in 0..1 (got {part!r}).")
        for dtype, _ in self.dtype_flops:
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise PlanError(f"Machine dtype_flops must name dtypes of torch, as 'bfloat16' (got {dtype!r}).")

    @classmethod
    def preset(cls, name: str, *, tf32: bool = False, **changes: Any) -> Machine:
        """A commercial machine by name; `PRESETS` lists the names and the sources of the constants.

        Args:
            name: one of `PRESETS`.
            tf32: whether float32 products run in TF32, as under `torch.set_float32_matmul_precision("high")`.
            changes: constants in place of the preset's, such as the bandwidth of one mesh axis.

        Raises:
            PlanError: the name is unknown, or the machine has no TF32 units and `tf32` is set.

        >>> Machine.preset("h100_nvlink", axis_bandwidth={"data": 5e10}).axis_bandwidth
        (('data', 50000000000.0),)
        """
        if name not in PRESETS:
            raise PlanError(f"Unknown machine {name!r}. Expected one of {', '.join(PRESETS)}, or give constants.")
        if tf32 and name not in TF32_FLOPS:
            raise PlanError(f"Machine {name!r} has no TF32 units; {', '.join(TF32_FLOPS)} have. Leave out tf32=True.")
        found = attrs.evolve(PRESETS[name], origin=f"preset {name}{', with changes' if changes or tf32 else ''}")
        if tf32:
            changes = {"dtype_flops": {**dict(found.dtype_flops), "float32": TF32_FLOPS[name]}} | changes
        return attrs.evolve(found, **changes)

    @classmethod
    def measure(cls, mesh: Mesh) -> Machine:
        """Measure the constants of a mesh.

        On a distributed mesh this is a collective call, takes some seconds, and gives all ranks the same
        machine, in numbers of two digits. The ranks of a virtual mesh share one process, which is measured in some
        seconds: each counts with 1/n of the process's arithmetic rate, memory bandwidth and memory, for n ranks. The
        time of a collective is the time for all ranks together.

        Raises:
            MeshError: an abstract mesh.
            SpmdError: on a distributed mesh, a rank failed or never makes the call.
        """
        if mesh.runtime is Runtime.DISTRIBUTED:
            return cls._measure_ranks(mesh)
        products = {str(dtype): rate for dtype, rate in measure_products(mesh).items()}
        links = {axis: measure_link(mesh, axis) for axis, size in mesh.axes.items() if size > 1}
        copies = measure_copies(mesh)
        return cls(
            flops=products["torch.float32"],
            dtype_flops=products,
            memory_bandwidth=copies,
            memory_capacity=memory_of(mesh, mesh.size),
            link_bandwidth=min((link.bandwidth for link in links.values()), default=copies),
            axis_bandwidth={axis: link.bandwidth for axis, link in links.items()},
            latency=max((link.latency for link in links.values()), default=0.0),
            axis_latency={axis: link.latency for axis, link in links.items()},
            origin=f"measured on {mesh.size} virtual ranks",
        )

    @classmethod
    def _measure_ranks(cls, mesh: Mesh) -> Machine:
        mesh.require_processes()
        hosts = gather_hosts(f"the measurement of {mesh}", mesh)
        found = measure_ranks(mesh, hosts)
        products = {dtype: _rounded(rate) for dtype, rate in found.products.items()}
        roofline, bandwidth = found.roofline, _rounded(found.roofline.memory_bandwidth)
        links = [
            Link(link.axis, link.kind, *map(_rounded, (link.latency, link.bandwidth, link.wait)))
            for link in found.links
        ]
        return cls(
            flops=products["torch.float32"],
            dtype_flops=products,
            memory_bandwidth=bandwidth,
            memory_capacity=memory_of(mesh, hosts.count(0)),
            link_bandwidth=min((link.bandwidth for link in links), default=bandwidth),
            latency=max((link.latency for link in links), default=0.0),
            operator_latency=_rounded(found.operator_latency),
            transcendental_seconds=_rounded(roofline.transcendental_seconds),
            overlap=round(found.overlap, 1),
            memory_overlap=roofline.memory_overlap,
            write_allocate=roofline.write_allocate,
            fuses=False,
            links=links,
            origin=f"measured on {describe_ranks(mesh, hosts)}",
        )

    def __str__(self) -> str:
        rates = ", ".join(f"{dtype} {rate / 1e9:.3g}" for dtype, rate in self.dtype_flops)
        parts = [
            f"{self.flops / 1e9:.3g} Gflop/s" + (f" ({rates})" if rates else ""),
            f"memory {size_text(self.memory_bandwidth)}/s",
            f"links {size_text(self.link_bandwidth)}/s",
            *(f"{axis} {size_text(rate)}/s" for axis, rate in self.axis_bandwidth),
            f"latency {time_text(self.latency)}",
            *(f"{axis} {time_text(seconds)}" for axis, seconds in self.axis_latency),
            *([f"operators {time_text(self.operator_latency)}"] if self.operator_latency else []),
            *([f"tanh {time_text(self.transcendental_seconds)}"] if self.transcendental_seconds else []),
            *([f"overlap {self.overlap:g}"] if self.overlap < 1 else []),
            *([f"memory overlap {self.memory_overlap:g}"] if self.memory_overlap < 1 else []),
            *(["write allocate"] if self.write_allocate else []),
            *([] if self.fuses else ["nothing fused"]),
        ]
        return f"{self.origin or GIVEN}: {', '.join(parts)}"

    def with_launch_times(self, factor: float) -> Machine:
        """The machine on which each launch takes `factor` times as long, and the bytes in it as long as here."""
        links = (attrs.evolve(link, latency=factor * link.latency, wait=factor * link.wait) for link in self.links)
        axis_latency = {axis: factor * time for axis, time in self.axis_latency}
        return attrs.evolve(self, latency=factor * self.latency, axis_latency=axis_latency, links=links)

    def rate(self, dtype: torch.dtype | None = None) -> float:
        """Floating-point operations per second in a dtype; `flops` for None and for dtypes without a rate."""
        return self._rates.get(dtype, self.flops)

    def traffic(self, read: float, written: float) -> float:
        """The bytes that pass between memory and compute units where operands and new results have so many."""
        return self._rooflines[None].traffic(read, written)

    def compute_seconds(
        self, flops: float, bytes: float, dtype: torch.dtype | None = None, evaluations: float = 0.0
    ) -> float:
        """Seconds of an operator, by its `Roofline`.

        Args:
            flops: the number of its floating-point operations.
            bytes: bytes that it reads and writes, by `traffic`.
            dtype: the dtype that it computes in.
            evaluations: evaluations of transcendental functions.
        """
        roofline = self._rooflines.get(dtype) or self._rooflines[None]
        return roofline.seconds(flops, bytes, evaluations)

    def copy_seconds(self, read: float, written: float) -> float:
        """Seconds of an operator without arithmetic that reads and writes so many bytes."""
        return self.compute_seconds(0.0, self.traffic(read, written))

    def collective_seconds(
        self, kind: str, axes: tuple[str, ...], bytes: float, *, latency_share: float = 1.0
    ) -> float:
        """Seconds of a collective over `axes` in which each rank sends `bytes`, until its result is there.

        Latency and bandwidth are the worst among the axes; latencies of `links` add, because the group is as large as
        the axes together. `latency_share` is the part of the latency, and of the wait, that it pays, where it is
        launched together with others.
        """
        latency, bandwidth, wait = self._constants_along(kind, axes)
        return latency_share * (latency + wait) + bytes / bandwidth

    def sending_seconds(self, kind: str, axes: tuple[str, ...], bytes: float) -> float:
        """The part of `collective_seconds` in which the collective occupies the links of its axes."""
        latency, bandwidth, _ = self._constants_along(kind, axes)
        return latency + bytes / bandwidth

    def wait_seconds(self, kind: str, axes: tuple[str, ...]) -> float:
        """The rest of `collective_seconds`, which passes beside everything else."""
        return self._constants_along(kind, axes)[2]

    @property
    def bucket_bytes(self) -> float:
        """The bytes of the buffer up to which collectives are joined to one launch.

        The least that nearly saturates the link: latency and wait are then a twentieth of the time. At least 1 MiB and
        at most 25 MiB, the bucket of DistributedDataParallel; memory of 32 MiB and more is new to a process at each
        allocation (`mallopt(3)`), and takes longer to write than to send.
        """
        wait = max((link.wait for link in self.links), default=0.0)
        saturating = 20 * (self.latency + wait) * self.link_bandwidth
        return min(max(saturating, 2.0**20), 25 * 2.0**20)

    @property
    def launch_schedule(self) -> LaunchSchedule:
        """The schedule with the largest buckets, and a window of one."""
        return LaunchSchedule(self.bucket_bytes, self.bucket_bytes)

    @cached_property
    def _rooflines(self) -> dict[torch.dtype | None, Roofline]:
        """By dtype; that of None is for all others."""
        others = self.memory_bandwidth, self.transcendental_seconds, self.memory_overlap, self.write_allocate
        return {dtype: Roofline(rate, *others) for dtype, rate in {**self._rates, None: self.flops}.items()}

    @cached_property
    def _rates(self) -> dict[torch.dtype | None, float]:
        rates: dict[torch.dtype | None, float] = {getattr(torch, name): rate for name, rate in self.dtype_flops}
        parts = ((dtype.to_complex(), rate) for dtype, rate in rates.items() if dtype in _PARTS_OF_COMPLEX)
        return {**dict(parts), **rates}

    def _constants_along(self, kind: str, axes: tuple[str, ...]) -> tuple[float, float, float]:
        """Latency, bandwidth and wait of collectives of a kind along some mesh axes together."""
        latencies, bandwidths, waits = zip(*(self._constants(kind, axis) for axis in axes), strict=True)
        measured = all((axis, kind) in self._with_links for axis in axes)
        return sum(latencies) if measured else max(latencies), min(bandwidths), sum(waits)

    def _constants(self, kind: str, axis: str) -> tuple[float, float, float]:
        """Latency, bandwidth and wait of collectives of a kind along one mesh axis."""
        found = self._found.get((axis, kind))
        if found is None:
            bandwidth = dict(self.axis_bandwidth).get(axis, self.link_bandwidth)
            found = self._found[axis, kind] = dict(self.axis_latency).get(axis, self.latency), bandwidth, 0.0
        return found

    @cached_property
    def _with_links(self) -> frozenset[tuple[str, str]]:
        return frozenset((link.axis, link.kind) for link in self.links)

    @cached_property
    def _found(self) -> dict[tuple[str, str], tuple[float, float, float]]:
        """What `_constants` knows: first the links, and later what it was asked for."""
        return {(link.axis, link.kind): (link.latency, link.bandwidth, link.wait) for link in self.links}


_PARTS_OF_COMPLEX = (torch.float16, torch.float32, torch.float64)


def _hopper(memory_bandwidth: float, memory_capacity: int) -> Machine:
    """An H100 or H200, which differ only in their memory."""
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
"""Machines by name, with the peak rates of their data sheets, so that predicted times are lower bounds.
`Machine.measure` measures achieved rates.

Rates are those of dense products, half of a data sheet's rates with sparsity. Dtypes without units of their own have
the rate of float32. Link bandwidths are those of one direction, half of a data sheet's sum of both. Latencies assume
collectives in buckets, as the default does.

- `h100_nvlink`, `h200`: SXM, NVIDIA H100 and H200 Tensor Core GPU data sheets. float64 on tensor cores; float32 in full
  precision, as is torch's default. NVLink 4 at 900 GB/s for both directions together, inside one node.
- `a100`: SXM 80 GB, NVIDIA A100 Tensor Core GPU data sheet. As above, with NVLink 3 at 600 GB/s.
- `tpu_v5p`: Google Cloud's page on TPU v5p. float32 runs as bfloat16 passes and is priced as one pass. 1,200 GB/s for
  both directions together over six links; a mesh axis is assumed to be one axis of the 3D torus, with two links.
- `cpu`: one socket per rank, AMD EPYC 9654 data sheet: 96 cores at 2.4 GHz, twelve channels of DDR5-4800, 64 GB on
  each. A Zen 4 core does 16 float64, 32 float32 or 64 bfloat16 operations per cycle. Sockets are assumed to be linked
  by Ethernet at 100 Gb/s, with ten times the latency of the other presets.
"""

TF32_FLOPS: Mapping[str, float] = MappingProxyType({"h100_nvlink": 494.5e12, "h200": 494.5e12, "a100": 156e12})
"""Dense rates of float32 products in TF32, in floating-point operations per second, from the same data sheets."""
