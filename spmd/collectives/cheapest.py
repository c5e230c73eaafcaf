"""The search for the cheapest steps from one spec to another: the A* algorithm over specs."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

import attrs
import torch

from spmd.collectives.block_exchange import BlockExchange
from spmd.collectives.moves import exchanges, next_steps
from spmd.collectives.step import Step
from spmd.core.spec import Dims, DTensorSpec

LAUNCH_BYTES = 200_000
"""What a rank could send in the time of a launch: 0.5 us at 400 GB/s, as `Machine` has it, or 100 us at 2 GB/s."""

MOST_STEPS, MOST_STEPS_IN_PROGRAMS = 20_000, 3_000
"""The steps looked at for ways that put axes elsewhere than the goal; some may be too many to look at all of them."""

ROUNDING = 1e-9
"""What a sum of bytes may differ by, as a part of it."""


def eager_cost(step: Step | BlockExchange) -> float:
    """The time of a step outside of a program, in bytes that could be sent in it.

    An exchange packs what it sends, which counts as a sixteenth of sending it.
    """
    sent = step.bytes * 17 / 16 if isinstance(step, BlockExchange) else step.bytes
    return sent + LAUNCH_BYTES * step.is_collective


@attrs.frozen
class Way:
    """Steps that follow each other, with their price and the number of collectives."""

    steps: tuple[Step | BlockExchange, ...] = ()
    price: float = 0.0
    collectives: int = 0


@attrs.frozen
class Ways:
    """The ways to a spec among which the cheapest is searched.

    Args:
        goal: the spec.
        largest: the bytes of the largest shard that may be on the way.
        eager: whether they are outside of a program: there exchanges are steps, too, and steps cost `eager_cost`. In a
            program they cost the bytes that they send.
        reduce_dtype, anywhere: as of `next_steps`.
        most_collectives: how many there may be.
    """

    goal: DTensorSpec
    largest: float
    eager: bool = False
    reduce_dtype: torch.dtype | None = None
    anywhere: Dims = ()
    most_collectives: float = math.inf

    def cheapest(self, source: DTensorSpec, below: float = math.inf) -> Way | None:
        """The way from a spec with the lowest price; among those, with the fewest collectives, then steps.

        Ties are broken by the order in which steps are listed. None if no way costs less than `below`.
        """
        if at_least(source, self.goal, self.eager) >= below * (1 - 2 * ROUNDING):
            return None
        looked_at, most = itertools.count(), MOST_STEPS if self.eager else MOST_STEPS_IN_PROGRAMS
        queue = [(0.0, 0, 0, 0, source, Way())]
        fewest: dict[DTensorSpec, float] = {}  # collectives on the ways to a spec that were followed
        best = below  # of the ways to the goal that were found
        while queue and (not self.anywhere or next(looked_at) < most):
            _, collectives, _, _, here, way = heapq.heappop(queue)
            if here == self.goal:
                return way
            if fewest.get(here, math.inf) <= collectives:
                continue
            fewest[here] = collectives if self.most_collectives < math.inf else 0
            for number, step in zip(looked_at, self._steps(here, way, best), strict=False):
                if fewest.get(step.target, math.inf) <= way.collectives:
                    continue
                left = at_least(step.target, self.goal, self.eager)
                if isinstance(step, BlockExchange) and way.price + at_least(here, step.target, True) + left > best:
                    continue  # its blocks need not be found
                price = way.price + (eager_cost(step) if self.eager else step.bytes)
                collectives = way.collectives + step.is_collective
                needed = collectives + (not is_local(step.target, self.goal))
                if needed > self.most_collectives or price + left > best or price + left >= below:
                    continue
                best = price if step.target == self.goal else best
                further = Way((*way.steps, step), price, collectives)
                heapq.heappush(queue, (price + left, collectives, len(further.steps), number, step.target, further))
        return None

    def _steps(self, here: DTensorSpec, way: Way, best: float) -> Iterator[Step | BlockExchange]:
        """The steps that may follow a way, if the cheapest that was found costs `best`."""
        steps: Iterator[Step | BlockExchange] = next_steps(here, self.goal, self.reduce_dtype, self.anywhere)
        if self.eager and (way.price + LAUNCH_BYTES < best or not way.steps):
            steps = itertools.chain(steps, exchanges(here, self.goal, self.anywhere))
        return (step for step in steps if step.target.local_bytes() <= self.largest)


def at_least(here: DTensorSpec, goal: DTensorSpec, eager: bool) -> float:
    """What any way from a spec to another costs, by the bytes that the ranks receive on average.

    A rank receives what its new shard is larger than the old. Of a reduction of n parts, n - 1 are sent for each
    element, and its result to all other ranks that need it.
    """
    if is_local(here, goal):
        return 0.0
    held, wanted = (1 / spec.mesh.axis_size([*itertools.chain(*spec.dims)]) for spec in (here, goal))
    lacks = wanted - held
    if goal.partial:
        lacks *= not eager  # an exchange gives neutral elements to most ranks, which are not sent
    elif here.partial:
        lacks = wanted + (here.mesh.axis_size([axis for axis, _ in here.partial]) - 2) / here.mesh.size
    return max(0.0, lacks) * here.meta.nbytes * (1 - ROUNDING) + LAUNCH_BYTES * eager


def is_local(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether ranks need not communicate, because each holds what it needs."""
    return (
        source.mesh == target.mesh
        and all(after[: len(before)] == before for before, after in zip(source.dims, target.dims, strict=True))
        and set(source.partial) <= set(target.partial)
    )
