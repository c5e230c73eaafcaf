"""Measurements of the cost model's constants on a distributed mesh, by all ranks together.

All ranks compute at once, because those of one host share its processors and memory, and each of them measures. Each
time is that of several runs, and ranks agree on the median of theirs. All takes five to nine seconds on two cores.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist

from spmd.collectives.bytes_sent import bytes_of_call
from spmd.collectives.distributed.agreement import gather, spans_processes
from spmd.collectives.distributed.exchange import Exchange, bind
from spmd.collectives.distributed.process_groups import group_for
from spmd.collectives.primitives import COLLECTIVES
from spmd.core.mesh import Mesh
from spmd.core.spec import TensorMeta
from spmd.ir.comm import StepKind
from spmd.plan.machine.hosts import hosts_along
from spmd.plan.machine.link import Link
from spmd.plan.machine.measure import DTYPES
from spmd.plan.machine.reference import predicted_seconds, references

Run: TypeAlias = Callable[[], object]

Computation: TypeAlias = tuple[Run, float]
"""What a rank computes, and the seconds that it takes."""

_BLOCKS, _BLOCK = 4, 3.2e-2
"""How many blocks of runs are timed, and seconds of each: some time slices, where ranks share processors."""

_LONG_BLOCK = 5e-2
"""Seconds of a block of runs of the reference program, of which one takes some milliseconds."""

_MANY, _FEW, _PAIR = 10, 7, 2
"""How many runs of each collective are timed: of small ones, whose times vary much, and of others; and how many of
these together."""

_FIRST = 4
"""How many runs are not timed, since buffers are new to a process in its first ones."""

_BETWEEN = 1e-3
"""Seconds of computation between two small collectives, as between those of a step."""

_LONG = 4e-2
"""Seconds that are long for a collective of medium size: a larger one is not timed."""

_FRESH = 2**27
"""Bytes that a rank on processors writes first: memory that is new to a process, or even to its host, is slow."""

_SLOW = 2e-3
"""Seconds from which on a small product is not followed by larger ones, which a processor without units for the dtype
takes long for."""

_CPU_ORDERS, _ACCELERATOR_ORDERS = (128, 256), (512, 4096)
"""Orders of square matrices: a small product, and one that shows the rate."""

_CPU_BYTES, _ACCELERATOR_BYTES = 2**21, 2**28
"""Bytes of each of `_OPERANDS` tensors, which together do not fit into caches."""

_OPERANDS = 16

_SMALL, _MEDIUM, _LARGE = 2**12, 2**22, 2**24
"""Bytes of the operands of collectives: those of a lone small one, of one in caches, and of a bucket. The last one is
left out where the one before takes long."""


@attrs.frozen
class RankConstants:
    """The constants of one rank among all, as those of `Machine`."""

    products: Mapping[str, float]
    memory_bandwidth: float
    memory_overlap: float
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
    if mesh.device.type == "cpu":
        torch.ones(_FRESH, dtype=torch.uint8)
    _start(mesh)
    seconds: dict[Hashable, float] = {}  # a product's per operation, traffic's per byte, that of others per call
    programs = references(mesh.device)
    with torch.no_grad():
        seconds["references"] = sum(_seconds(mesh, program, _LONG_BLOCK) for program in programs)
        seconds |= {str(dtype): found for dtype in DTYPES if (found := _product(mesh, dtype)) is not None}
        seconds |= {"traffic": _traffic(mesh), "operator": _operator(mesh)}
        layouts = _layouts(mesh, hosts)
        axes = list(dict.fromkeys(layouts.values()))
        seconds |= _collectives(mesh, axes, _computation(mesh))
        overlap = min((_overlap(mesh, axis) for axis in axes), default=1.0)
    every: list[tuple[dict[Hashable, float], float]] = gather(
        f"the measurement of {mesh}", (seconds, overlap), mesh.ranks
    )
    agreed = {key: statistics.median(of.get(key, math.inf) for of, _ in every) for key in every[0][0]}
    rates = {str(dtype): 1 / agreed[str(dtype)] for dtype in DTYPES if agreed.get(str(dtype), math.inf) < math.inf}
    constants = rates[str(torch.float32)], 1 / agreed["traffic"], agreed["operator"]
    memory_overlap = 0.0 if mesh.device.type == "cpu" else 1.0  # a core waits for what its products read
    predicted = sum(predicted_seconds(program, *constants, memory_overlap) for program in programs)
    slower = max(agreed["references"] / predicted, 1.0)
    return RankConstants(
        {dtype: rate / slower for dtype, rate in rates.items()},
        1 / agreed["traffic"] / slower,
        memory_overlap,
        agreed["operator"],
        tuple(_link(mesh, axis, like, kind, agreed) for axis, like in layouts.items() for kind in _CALLS),
        statistics.median(value for _, value in every),
    )


def _product(mesh: Mesh, dtype: torch.dtype) -> float | None:
    """Seconds of a floating-point operation in matrix products; None if the device does not support the dtype."""
    small, large = _CPU_ORDERS if mesh.device.type == "cpu" else _ACCELERATOR_ORDERS
    try:
        seconds = min(_once(mesh, _multiply(mesh, small, dtype)) for _ in range(2))  # the first may set up a library
    except (RuntimeError, TypeError):
        return None
    if seconds > _SLOW:
        return seconds / (2 * small**3)
    return _seconds(mesh, _multiply(mesh, large, dtype)) / (2 * large**3)


def _multiply(mesh: Mesh, order: int, dtype: torch.dtype = torch.float32) -> Run:
    matrix = torch.ones(order, order, dtype=dtype, device=mesh.device)
    return functools.partial(torch.mm, matrix, matrix)


def _traffic(mesh: Mesh) -> float:
    """Seconds of a byte that an elementwise operator reads or writes, for operands that are not in a cache."""
    count = (_CPU_BYTES if mesh.device.type == "cpu" else _ACCELERATOR_BYTES) // 4
    operands = [torch.ones(count, device=mesh.device) for _ in range(_OPERANDS)]

    def add() -> None:
        for x, y in zip(operands[::2], operands[1::2], strict=True):
            torch.add(x, y)

    return _seconds(mesh, add) / (_OPERANDS // 2 * 3 * 4 * count)


def _operator(mesh: Mesh) -> float:
    """Seconds of an operator on few elements and of a view, since programs have about as many of both."""
    x = torch.ones(8, 8, device=mesh.device)
    return _seconds(mesh, lambda: (x.view(64) + x.view(64), x.t() @ x, x.sum(0))) / 3


def _layouts(mesh: Mesh, hosts: tuple[int, ...]) -> dict[str, str]:
    """For each axis of several ranks, the first one of as many ranks whose groups are on as many hosts."""
    first: dict[Hashable, str] = {}
    found = {}
    for axis in (axis for axis, size in mesh.axes.items() if size > 1):
        found[axis] = first.setdefault((mesh.axis_size(axis), hosts_along(mesh, axis, hosts)), axis)
    return found


def _collectives(mesh: Mesh, axes: Sequence[str], computation: Computation | None) -> dict[Hashable, float]:
    """Seconds of a small and a large collective of each kind along each axis.

    Of the large ones, the times of all kinds and axes are those of the same seconds: they are compared with each other,
    and processors that others use, too, are not always as fast.
    """
    found: dict[Hashable, float] = {}
    for axis, kind in itertools.product(axes, _CALLS):
        found[axis, kind, _SMALL] = _small(mesh, _sending(mesh, axis, kind, _SMALL), computation)
        found[axis, kind, _MEDIUM] = _together(mesh, _sending(mesh, axis, kind, _MEDIUM))
    every = gather(f"the measurement of {mesh}", found, mesh.ranks)
    large = {
        (axis, kind, _LARGE): _repeated(_PAIR, _sending(mesh, axis, kind, _LARGE))
        for axis, kind in itertools.product(axes, _CALLS)
        if statistics.median(times[axis, kind, _MEDIUM] for times in every) < _LONG
    }
    rounds = [{key: _started(mesh, pair) / _PAIR for key, pair in large.items()} for _ in range(1 + _FEW)]
    return found | {key: statistics.median(times[key] for times in rounds[1:]) for key in large}


def _sending(mesh: Mesh, axis: str, kind: StepKind, nbytes: int) -> Run:
    """A collective."""
    call, x = _collective(mesh, axis, kind, nbytes)
    return functools.partial(call, x)


def _small(mesh: Mesh, run: Run, computation: Computation | None) -> float:
    """Seconds of a small collective, alone or between computations, whichever is more.

    On processors that ranks share, one waits for the others until these have had their time slices, in which they
    compute.
    """
    found = _together(mesh, _repeated(_MANY, run), 1) / _MANY
    if computation is None:
        return found
    compute, computing = computation
    return max(found, _together(mesh, _repeated(_MANY, compute, run), 2) / _MANY - computing)


def _computation(mesh: Mesh) -> Computation | None:
    """Products that take about as long as a step computes between two collectives, and their seconds on all ranks.

    None on devices that run nothing else while they communicate.
    """
    if mesh.device.type != "cpu":
        return None
    multiply = _multiply(mesh, _CPU_ORDERS[0])
    products = max(round(_BETWEEN / min(_once(mesh, multiply) for _ in range(_FEW))), 1)
    compute = _repeated(products, multiply)
    return compute, _together(mesh, _repeated(_MANY, compute)) / _MANY


def _repeated(count: int, *runs: Run) -> Run:
    """Some runs, one after the other, so many times."""

    def repeated() -> None:
        for _ in range(count):
            for run in runs:
                run()

    return repeated


def _link(mesh: Mesh, axis: str, like: str, kind: StepKind, seconds: Mapping[Hashable, float]) -> Link:
    """The line through the times of two collectives along the axis `like`."""
    sizes = _SMALL, _LARGE if (like, kind, _LARGE) in seconds else _MEDIUM
    small, large = ((_sent(mesh, axis, kind, size), seconds[like, kind, size]) for size in sizes)
    slope = (large[1] - small[1]) / (large[0] - small[0])
    if slope <= 0:  # noise: use the achieved bandwidth, latency included
        slope = large[1] / large[0]
    return Link(axis, kind, max(small[1] - slope * small[0], 0.0), 1 / slope)


def _overlap(mesh: Mesh, axis: str) -> float:
    """The part of an all_reduce's time that passes beside matrix products which take about as long."""
    call, x = _collective(mesh, axis, StepKind.ALL_REDUCE, _MEDIUM)
    multiply = _multiply(mesh, (_CPU_ORDERS if mesh.device.type == "cpu" else _ACCELERATOR_ORDERS)[0])
    communicate = functools.partial(call, x)
    compute = _repeated(max(round(_together(mesh, communicate) / _seconds(mesh, multiply)), 1), multiply)

    def both() -> None:
        pending = call.start(x)
        compute()
        call.finish(pending)

    runs = [_repeated(_PAIR, run) for run in (communicate, compute, both)]
    rounds = [[_started(mesh, run) for run in runs] for _ in range(_MANY)]
    overlaps = [(apart + computing - together) / min(apart, computing) for apart, computing, together in rounds]
    return min(max(statistics.median(overlaps), 0.0), 1.0)


def _seconds(mesh: Mesh, run: Run, seconds: float = _BLOCK) -> float:
    """Seconds of a run while all ranks compute: the median of the means of blocks of runs.

    Ranks do not wait for each other here: what one of them computes depends on its times.
    """
    run()
    return statistics.median(_block(mesh, run, seconds) for _ in range(_BLOCKS))


def _block(mesh: Mesh, run: Run, seconds: float) -> float:
    start, runs = time.perf_counter(), 0
    while True:
        run()
        runs += 1
        if time.perf_counter() - start > seconds:
            _synchronize(mesh)
            return (time.perf_counter() - start) / runs


def _together(mesh: Mesh, run: Run, runs: int = _FEW) -> float:
    """The median seconds of a few runs, which communicate: as many on every rank, after some more."""
    for _ in range(min(runs, _FIRST)):
        run()
    _start(mesh)
    return statistics.median(_once(mesh, run) for _ in range(runs))


def _started(mesh: Mesh, run: Run) -> float:
    """Seconds of a run that all ranks start together."""
    _start(mesh)
    return _once(mesh, run)


def _once(mesh: Mesh, run: Run) -> float:
    start = time.perf_counter()
    run()
    _synchronize(mesh)
    return time.perf_counter() - start


def _start(mesh: Mesh) -> None:
    """Wait until all ranks are here and their devices idle."""
    _synchronize(mesh)
    if spans_processes(mesh):
        dist.barrier(group=group_for("measurements", mesh.ranks))


def _synchronize(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def _collective(mesh: Mesh, axis: str, kind: StepKind, nbytes: int) -> tuple[Exchange, torch.Tensor]:
    """A collective as a rank's program runs it, and its operand."""
    op, shape, arguments = _CALLS[kind](mesh.axis_size(axis), nbytes // 4)
    (coordinate,) = mesh.held_coordinates
    x = torch.ones(shape, device=mesh.device)
    call = bind(op, mesh, coordinate, TensorMeta.of(x), (*arguments, [axis]))
    assert isinstance(call, Exchange)
    return call, x


def _sent(mesh: Mesh, axis: str, kind: StepKind, nbytes: int) -> float:
    op, shape, arguments = _CALLS[kind](mesh.axis_size(axis), nbytes // 4)
    return bytes_of_call(op, (mesh.axis_size(axis),), shape, 4, arguments)


_ops = torch.ops.spmd

_Example: TypeAlias = tuple[Any, tuple[int, ...], tuple[Any, ...]]

_EXAMPLES: Sequence[Callable[[int, int], _Example]] = (
    lambda ranks, count: (_ops.all_reduce.default, (count,), ("sum",)),
    lambda ranks, count: (_ops.all_gather.default, (count // ranks,), (0, count // ranks * ranks)),
    lambda ranks, count: (_ops.reduce_scatter.default, (count,), ("sum", 0, count)),
    lambda ranks, count: (_ops.all_to_all.default, (ranks, count // ranks), (0, 1, 1, count // ranks * ranks)),
    lambda ranks, count: (_ops.permute.default, (count,), ([(n + 1) % ranks for n in range(ranks)], [count])),
)
"""Each kind of collective for a number of ranks and of elements: operator, shape of the operand, other arguments."""

_CALLS: Mapping[StepKind, Callable[[int, int], _Example]] = MappingProxyType(
    {COLLECTIVES[example(2, 2)[0]]: example for example in _EXAMPLES}
)
