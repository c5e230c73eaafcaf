"""Measurements of collectives on a distributed mesh, by all ranks together."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import torch

from spmd.collectives.distributed.exchange import bind
from spmd.collectives.primitives import ALL_REDUCE, KINDS
from spmd.collectives.transport.exchange import Exchange
from spmd.core.mesh import Mesh
from spmd.core.spec import TensorMeta
from spmd.plan.machine.hosts import hosts_along
from spmd.plan.machine.link import Link
from spmd.plan.machine.reference import small_product
from spmd.plan.machine.timed_runs import (
    Run,
    agreed,
    apart,
    in_turns,
    medians,
    once,
    once_on_processors,
    repeated,
)

Collective: TypeAlias = tuple[Exchange, torch.Tensor]
"""A collective as a rank's program runs it, and its operand."""

_SMALL, _MEDIUM, _LARGE = 2**12, 2**22, 3 * 2**23
"""Bytes of the operands of collectives: those of a lone small one, of one in caches, and of a bucket. The last one is
left out where it would take long."""

_LONG = 0.25
"""Seconds that are long for a large collective."""

_ALL, _LEAST, _MOST = 0.25, 5, 12
"""Seconds of all runs of large collectives together, and how many of each there are at least and at most."""

_ROUNDS, _MANY = 5, 6
"""How often other collectives are timed, and how many small ones one after the other."""

_UNDER_WAY, _BESIDES = 10, 1e-2
"""Small collectives that are started before a computation and waited for after it; the seconds of this computation."""

_BESIDE = "beside computation"
"""In place of a kind and a size: what a small collective takes from a computation."""


def measure_links(mesh: Mesh, hosts: tuple[int, ...], sharing: float) -> tuple[tuple[Link, ...], float]:
    """The links of a mesh, and the part of a collective's time that passes beside computation; a collective call.

    Args:
        mesh: the mesh.
        hosts: the number of each rank's host.
        sharing: ranks for each processor, the same on all ranks.
    """
    alike = _alike(mesh, hosts)
    axes = list(alike)
    seconds = agreed(mesh, _small(mesh, alike) | _beside_computation(mesh, axes, sharing) | _large(mesh, axes))
    links = (_link(mesh, axis, like, kind, seconds) for like in axes for axis in alike[like] for kind in KINDS)
    return tuple(links), min(agreed(mesh, {axis: _overlap(mesh, axis, sharing) for axis in axes}).values(), default=1.0)


def _alike(mesh: Mesh, hosts: tuple[int, ...]) -> dict[str, list[str]]:
    """The axes of as many ranks whose groups are on as many hosts, by the first of them; none of one rank."""
    found: dict[Hashable, list[str]] = defaultdict(list)
    for axis, size in mesh.axes.items():
        if size > 1:
            found[size, hosts_along(mesh, axis, hosts)].append(axis)
    return {axes[0]: axes for axes in found.values()}


def _small(mesh: Mesh, alike: Mapping[str, Sequence[str]]) -> dict[Any, float]:
    """Seconds of a small collective of each kind along the axes that are alike, which take turns.

    Where ranks share processors, one waits for the time slices of others, and longer where all ranks depend on each
    other, as in a step.
    """
    runs: dict[Any, Run] = {}
    for (first, axes), kind in itertools.product(alike.items(), KINDS):
        turns = itertools.islice(itertools.cycle(axes), _MANY)
        runs[first, kind, _SMALL] = repeated(1, *(_sending(mesh, axis, kind, _SMALL) for axis in turns))
    return {key: seconds / _MANY for key, seconds in medians(in_turns(mesh, runs, _ROUNDS)).items()}


def _beside_computation(mesh: Mesh, axes: Sequence[str], sharing: float) -> dict[Any, float]:
    """Seconds that a small collective along each axis takes from a long computation which it passes beside.

    These are seconds of processors: where ranks share them, the times of such computations vary by more.
    """
    if mesh.device.type != "cpu":
        return {}
    multiply = small_product(mesh.device)
    each = min(once(mesh, multiply) for _ in range(_ROUNDS))
    compute = _lasting(_BESIDES, multiply, each)
    collectives = {axis: [_collective(mesh, axis, kind, _SMALL) for kind in KINDS] for axis in axes}
    runs: dict[Any, Run] = {
        (axis, _BESIDE): functools.partial(_beside, found * (_UNDER_WAY // len(found)), compute)
        for axis, found in collectives.items()
    }
    timed = functools.partial(once_on_processors, sharing=sharing)
    rounds = in_turns(mesh, {None: compute, **runs}, _ROUNDS, timed)
    return {key: statistics.median(times[key] - times[None] for times in rounds) / _UNDER_WAY for key in runs}


def _beside(collectives: Sequence[Collective], compute: Run) -> None:
    """Collectives that are started before a computation, and waited for after it."""
    pending = [call.start(x) for call, x in collectives]
    compute()
    for (call, _), results in zip(collectives, pending, strict=True):
        call.finish(results)


def _large(mesh: Mesh, axes: Sequence[str]) -> dict[Any, float]:
    """Seconds of a collective of medium size of each kind along each axis, and of a large one.

    The times of all kinds and axes are those of the same seconds: they are compared with each other, and processors
    that others use, too, are not always as fast.
    """
    every = list(itertools.product(axes, KINDS))
    medium = medians(in_turns(mesh, {(*key, _MEDIUM): _sending(mesh, *key, _MEDIUM) for key in every}, _ROUNDS))
    expected = {key: seconds * _LARGE / _MEDIUM for key, seconds in agreed(mesh, medium).items()}
    short = {(axis, kind): seconds for (axis, kind, _), seconds in expected.items() if seconds < _LONG}
    rounds = min(max(round(_ALL / sum(short.values())), _LEAST), _MOST) if short else 1
    return medium | medians(in_turns(mesh, {(*key, _LARGE): _sending(mesh, *key, _LARGE) for key in short}, rounds))


def _link(mesh: Mesh, axis: str, like: str, kind: str, seconds: Mapping[Any, float]) -> Link:
    """The line through the times of two collectives along the axis `like`."""
    sizes = _SMALL, _LARGE if (like, kind, _LARGE) in seconds else _MEDIUM
    small, large = ((_sent(mesh, axis, kind, size), seconds[like, kind, size]) for size in sizes)
    slope = (large[1] - small[1]) / (large[0] - small[0])
    if slope <= 0:  # noise: use the achieved bandwidth, latency included
        slope = large[1] / large[0]
    until_there = max(small[1] - slope * small[0], 0.0)
    latency = min(max(seconds.get((like, _BESIDE), until_there), 0.0), until_there)
    return Link(axis, kind, latency, 1 / slope, until_there - latency)


def _overlap(mesh: Mesh, axis: str, sharing: float) -> float:
    """The part of an all_reduce's time that passes beside matrix products which take about as long."""
    multiply, collective = small_product(mesh.device), _collective(mesh, axis, ALL_REDUCE.name, _MEDIUM)
    communicate = functools.partial(_beside, [collective], repeated(0))
    (alone,) = medians(in_turns(mesh, {axis: communicate}, _ROUNDS)).values()
    compute = _lasting(alone, multiply, apart(mesh, multiply, sharing=sharing))
    both = functools.partial(_beside, [collective], compute)
    runs = dict(enumerate(repeated(2, run) for run in (communicate, compute, both)))
    rounds = [tuple(times.values()) for times in in_turns(mesh, runs, _ROUNDS)]
    overlaps = [(sent + computing - together) / min(sent, computing) for sent, computing, together in rounds]
    return min(max(statistics.median(overlaps), 0.0), 1.0)


def _lasting(seconds: float, run: Run, each: float) -> Run:
    """Runs of `each` seconds, one after the other, that take about so many seconds together; one run at least."""
    return repeated(max(round(seconds / each), 1), run)


def _sending(mesh: Mesh, axis: str, kind: str, nbytes: int) -> Run:
    """A collective."""
    return functools.partial(_beside, [_collective(mesh, axis, kind, nbytes)], repeated(0))


def _collective(mesh: Mesh, axis: str, kind: str, nbytes: int) -> Collective:
    """A collective as buckets launch it, which holds sums in the buffer that it sends. Zeros stay zeros there."""
    shape, arguments = KINDS[kind].example(mesh.axis_size(axis), nbytes // 4)
    (coordinate,) = mesh.held_coordinates
    x = torch.full(shape, 0.0, device=mesh.device)
    call = bind(KINDS[kind].op, mesh, coordinate, TensorMeta.of(x), (*arguments, [axis]))
    assert isinstance(call, Exchange)
    return attrs.evolve(call, op=call.in_place or call.op), x


def _sent(mesh: Mesh, axis: str, kind: str, nbytes: int) -> float:
    shape, arguments = KINDS[kind].example(mesh.axis_size(axis), nbytes // 4)
    return KINDS[kind].most_bytes_sent((mesh.axis_size(axis),), shape, 4, arguments)
