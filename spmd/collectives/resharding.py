"""Resharding: the cheapest sequence of primitives from one spec to another."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import attrs
import torch

from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.moves import exchanges, next_steps
from spmd.collectives.step import Step, without_trivial
from spmd.collectives.traffic import ring_bytes
from spmd.core.spec import DTensorSpec
from spmd.errors import ShardingError
from spmd.ir.comm import StepKind


@lru_cache(maxsize=65536)
def redistribution(
    source: DTensorSpec, target: DTensorSpec, reduce_dtype: torch.dtype | None = None
) -> tuple[Step, ...]:
    """The steps that take a value from one spec to another, with the fewest bytes sent per rank.

    A change along one axis is one step: Partial to Shard a reduce_scatter, Partial to Replicate an all_reduce, Shard to
    Replicate an all_gather, Shard to Shard an all_to_all; Replicate to Shard and to Partial are local. There are no
    steps between equal specs, or specs that differ only in axes of size 1. Sums run in `reduce_dtype`, as by
    `spmd.collectives.precision.summed_in`.

    Raises:
        ShardingError: specs of different meshes or metas.

    >>> import torch
    >>> from spmd.core.mesh import make_mesh
    >>> from spmd.core.spec import P, TensorMeta
    >>> mesh, meta = make_mesh({"x": 2}, runtime="virtual"), TensorMeta((4, 4), torch.float32)
    >>> partial = DTensorSpec.make(mesh, P(partial={"x": "sum"}), meta)
    >>> [str(step) for step in redistribution(partial, DTensorSpec.make(mesh, P("x"), meta))]
    ["reduce_scatter[x]: P(partial={'x': 'sum'}) -> P('x')"]
    """
    _check(source, target)
    return _joined(source, target, _cheapest(_without_trivial(source), _without_trivial(target), reduce_dtype))


def _check(source: DTensorSpec, target: DTensorSpec) -> None:
    if source.mesh != target.mesh or source.meta != target.meta:
        raise ShardingError(
            f"Only the spec of a value can change, not its mesh, shape or dtype (got {source} on {source.mesh}, "
            f"expected {target.meta} on {target.mesh})."
        )


def _joined(source: DTensorSpec, target: DTensorSpec, steps: tuple[Any, ...]) -> tuple[Any, ...]:
    """Steps between specs without axes of size 1, as steps between the given ones."""
    if steps:
        steps = (attrs.evolve(steps[0], source=source), *steps[1:])
        steps = (*steps[:-1], attrs.evolve(steps[-1], target=target))
    return steps


def _without_trivial(spec: DTensorSpec) -> DTensorSpec:
    """The spec without axes of size 1."""
    dims = tuple(without_trivial(spec.mesh, axes) for axes in spec.dims)
    partial = tuple((axis, op) for axis, op in spec.partial if spec.mesh.axis_size(axis) > 1)
    return attrs.evolve(spec, dims=dims, partial=partial)


@lru_cache(maxsize=65536)
def eager_redistribution(source: DTensorSpec, target: DTensorSpec) -> tuple[Step | BlockExchange, ...]:
    """As `redistribution`, but in the least time outside of a program, where `BlockExchange` is a step, too.

    The time of a step is that of its bytes and of `LAUNCH_BYTES` more for its launch. No spec between the steps has
    shards that are larger than those of both ends. The specs may be of two meshes.

    Raises:
        ShardingError: specs of different metas.

    >>> import torch
    >>> from spmd.core.mesh import make_mesh
    >>> from spmd.core.spec import P, TensorMeta
    >>> mesh, meta = make_mesh({"x": 2, "y": 2}, runtime="virtual"), TensorMeta((4, 4), torch.float32)
    >>> source, target = (DTensorSpec.make(mesh, spec, meta) for spec in (P(("x", "y")), P("y")))
    >>> [str(step) for step in eager_redistribution(source, target)]
    ["exchange[x, y]: P(('x', 'y')) -> P('y')"]
    """
    if source.mesh == target.mesh:
        _check(source, target)
        return _joined(source, target, _cheapest(_without_trivial(source), _without_trivial(target), None, eager=True))
    if source.meta != target.meta:
        raise ShardingError(f"Only the spec of a value can change (got {source}, expected {target.meta}).")
    ways = [(*eager_redistribution(source, middle), BlockExchange(middle, target)) for middle in _middles(source)]
    return min(ways, key=lambda steps: sum(map(eager_cost, steps)))


LAUNCH_BYTES = 200_000
"""What a rank could send in the time of a launch: 0.5 us at 400 GB/s, as `Machine` has it, or 100 us at 2 GB/s."""


def eager_cost(step: Step | BlockExchange) -> float:
    """The time of a step outside of a program, in bytes that could be sent in it.

    An exchange packs what it sends, which counts as a sixteenth of sending it.
    """
    sent = step.bytes * 17 / 16 if isinstance(step, BlockExchange) else step.bytes
    return sent + LAUNCH_BYTES * step.is_collective


def _middles(source: DTensorSpec) -> Iterator[DTensorSpec]:
    """The specs from which to leave a mesh: as it is, or with the pending reductions done in one of the usual ways."""
    yield source
    if axes := tuple(axis for axis, _ in source.partial):
        yield source.complete
        for dim in range(source.meta.ndim):
            dims = tuple(held + axes * (dim == number) for number, held in enumerate(source.dims))
            yield attrs.evolve(source.complete, dims=dims)


def _cheapest(
    source: DTensorSpec, goal: DTensorSpec, reduce_dtype: torch.dtype | None, *, eager: bool = False
) -> tuple[Any, ...]:
    """The cheapest steps through specs whose shards are not larger than those of the ends, or else through any."""
    limit = max(source.local_bytes(), goal.local_bytes())
    for most in (limit, math.inf):
        if found := _search(source, goal, reduce_dtype, most, eager):
            axes = without_trivial(source.mesh, source.mesh.names)
            if eager and 0 < len(axes) <= MOST_AXES:
                found = _search(source, goal, reduce_dtype, most, eager, axes, found[0]) or found
            return found[1]
    raise ShardingError(
        f"No sequence of collectives leads from {source} to {goal} on {source.mesh}. Please report this."
    )


MOST_AXES, MOST_STEPS = 4, 20_000
"""The axes, and the steps looked at, of the search for a way that puts axes where the goal does not have them."""


def _search(
    source: DTensorSpec,
    goal: DTensorSpec,
    reduce_dtype: torch.dtype | None,
    limit: float,
    eager: bool,
    anywhere: tuple[str, ...] = (),
    below: float = math.inf,
) -> tuple[float, tuple[Step | BlockExchange, ...]] | None:
    """The steps that send the fewest bytes; among those, the fewest collectives, then steps. With `eager`, by its cost.

    The A* algorithm over specs; ties are broken by the order in which steps are listed. None if no way costs less than
    `below`.
    """
    counter = itertools.count()
    queue: list[tuple[tuple[float, int, int], int, float, DTensorSpec, tuple[Step | BlockExchange, ...]]]
    queue = [((_at_least(source, goal, eager) if anywhere else 0.0, 0, 0), 0, 0.0, source, ())]
    done: set[DTensorSpec] = set()
    best = below  # of the ways to the goal that were found
    while queue and (not anywhere or next(counter) < MOST_STEPS):
        (bound, collectives, count), _, sent, here, path = heapq.heappop(queue)
        if bound >= below:
            return None
        if here == goal:
            return sent, path
        if here in done:
            continue
        done.add(here)
        steps: Iterator[Step | BlockExchange] = next_steps(here, goal, reduce_dtype, anywhere)
        if eager and (sent + LAUNCH_BYTES < best or not path):
            steps = itertools.chain(steps, exchanges(here, goal, anywhere))
        for number, step in zip(counter, steps, strict=False):
            if step.target in done or step.target.local_bytes() > limit:
                continue
            left = _at_least(step.target, goal, eager) if anywhere else 0.0
            if isinstance(step, BlockExchange):
                least = max(LAUNCH_BYTES, _at_least(here, step.target, eager))
                if sent + least + left > best:
                    continue  # its blocks need not be found
            price = round(sent + (eager_cost(step) if eager else _ring_bytes(step)), 3)
            if price + left > best or price + left >= below:
                continue
            best = price if step.target == goal else best
            cost = (price + left, collectives + step.is_collective, count + 1)
            heapq.heappush(queue, (cost, number, price, step.target, (*path, step)))
    return None


def _at_least(here: DTensorSpec, goal: DTensorSpec, eager: bool) -> float:
    """What any way to the goal costs, by the bytes that the ranks receive on average.

    A rank receives what its new shard is larger than the old. Of a reduction of n parts, n - 1 are sent for each
    element, and its result to all other ranks that need it.
    """
    if goal.partial:
        return 0.0
    parts = here.mesh.axis_size([axis for axis, _ in here.partial])
    held, wanted = (1 / spec.mesh.axis_size([*itertools.chain(*spec.dims)]) for spec in (here, goal))
    lacks = wanted - held if parts == 1 else wanted + (parts - 2) / here.mesh.size
    nbytes = max(0.0, lacks) * here.meta.nbytes * (1 - 1e-9)
    return nbytes + LAUNCH_BYTES * (eager and nbytes > 0)


def _ring_bytes(step: Any) -> float:
    """The bytes that a rank sends, were all shards as large as the largest."""
    whole = step.target if step.kind is StepKind.ALL_GATHER else step.source
    size = whole.local_bytes() / whole.meta.dtype.itemsize * step.sent_dtype.itemsize
    return ring_bytes(step.kind, whole.mesh.axis_size(step.axes), size)
