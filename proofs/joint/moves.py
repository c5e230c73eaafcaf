"""Placements on all mesh axes together: the cost of moving between them, and which are worth acquiring for consumers.

A move changes the placement on one axis, as every reshard of a plan does, and costs what it costs in the planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, product

import attrs
import numpy as np
import torch

from spmd.core.mesh import Mesh
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.plan.cost.local_cost import MoveCost
from spmd.plan.data.assignment import shrink
from spmd.plan.machine.machine import Machine

State = tuple[Placement, ...]
"""The placement of a value on each mesh axis, major first."""


@attrs.frozen(eq=False)
class Moves:
    """The cheapest sequences of moves between the states of a value.

    Args:
        states: all states of the value.
        seconds: time from each state (rows) to each (columns); infinite where there is no sequence of moves.
    """

    states: tuple[State, ...]
    seconds: np.ndarray

    def between(self, sources: Sequence[State], targets: Sequence[State]) -> np.ndarray:
        """Seconds from each source (rows) to each target (columns)."""
        return self.seconds[np.ix_(self.places(sources), self.places(targets))]

    def places(self, states: Sequence[State]) -> list[int]:
        """The indices of states in `states` of this object."""
        known = {state: place for place, state in enumerate(self.states)}
        return [known[state] for state in states]


@attrs.frozen(eq=False)
class Acquired:
    """The sets of states that are worth acquiring for the consumers of a value.

    Args:
        seconds: time to acquire all states of each set (columns), from each source (rows).
        offers: whether a consumer gets each required state (columns) from each set (rows) without communication.
    """

    seconds: np.ndarray
    offers: np.ndarray


def find_moves(
    machine: Machine,
    mesh: Mesh,
    order: Sequence[str],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    given: Iterable[Placement],
    latency_share: float = 1.0,
) -> Moves:
    """The cheapest sequences of moves between all states of a value (Floyd and Warshall, 1962).

    Args:
        machine: what moves cost.
        mesh: the mesh.
        order: its axes, major first.
        sizes: the logical shape of the value.
        dtype: its dtype.
        given: placements that the value is produced or required in; replicated placements and shards of dims longer
            than 1 are added.
        latency_share: the part of a launch's latency that its collectives pay.
    """
    shards = [Shard(dim) for dim, size in enumerate(sizes) if size > 1]
    single: list[Placement] = list(dict.fromkeys([Replicate(), *shards, *sorted(given, key=repr)]))
    states = tuple(
        state for state in product(single, repeat=len(order)) if len({p for p in state if isinstance(p, Partial)}) < 2
    )

    counts = [mesh.axis_size(axis) for axis in order]

    def seconds(source: State, target: State) -> float:
        changed = [index for index, pair in enumerate(zip(source, target, strict=True)) if pair[0] != pair[1]]
        if len(changed) != 1:
            return math.inf if changed else 0.0
        (moved,) = changed
        if any(isinstance(minor, Shard) and minor in (source[moved], target[moved]) for minor in source[moved + 1 :]):
            return math.inf  # a minor axis shards the dim that changes
        local = sizes
        for index in range(len(order)):
            if index != moved:
                local = shrink(local, source[index], counts[index])
        cost = MoveCost(machine, order[moved], counts[moved], local, dtype, latency_share=latency_share)
        return cost.seconds(source[moved], target[moved])

    best = np.array([[seconds(source, target) for target in states] for source in states])
    for middle in range(len(states)):
        best = np.minimum(best, best[:, middle, None] + best[None, middle])
    return Moves(states, best)


def find_acquired(moves: Moves, sources: Sequence[State], wanted: Sequence[State], most: int) -> Acquired:
    """The sets of up to `most` states worth acquiring: no other set is as cheap from all sources and offers as much.

    The cost of a set is that of the cheapest tree of moves to all of its states (Dreyfus and Wagner, 1971).
    """
    free = moves.seconds == 0
    starts, goals = moves.places(sources), moves.places(wanted)
    useful = [place for place in range(len(moves.states)) if free[place, goals].any()]
    trees: dict[tuple[int, ...], np.ndarray] = {(place,): moves.seconds[:, place] for place in useful}
    for size in range(2, most + 1):
        for chosen in combinations(useful, size):
            if not any(free[one, other] or free[other, one] for one, other in combinations(chosen, 2)):
                trees[chosen] = _join(moves, trees, chosen)
    seconds = np.array([tree[starts] for tree in trees.values()])
    offers = np.array([free[list(chosen)][:, goals].any(0) for chosen in trees])
    kept = _undominated(seconds, offers)
    return Acquired(seconds[kept].T, offers[kept])


def _join(moves: Moves, trees: dict[tuple[int, ...], np.ndarray], chosen: tuple[int, ...]) -> np.ndarray:
    """Seconds of the cheapest tree from every state to all chosen ones: a path, then two smaller trees from its end."""
    splits = (part for size in range(1, len(chosen) // 2 + 1) for part in combinations(chosen, size))
    forks = [trees[part] + trees[tuple(place for place in chosen if place not in part)] for part in splits]
    least: np.ndarray = (moves.seconds + np.min(forks, axis=0)).min(1)
    return least


def _undominated(seconds: np.ndarray, offers: np.ndarray) -> list[int]:
    kept: list[int] = []
    for row in np.lexsort((-offers.sum(1), seconds.sum(1))):
        cheaper = (seconds[kept] <= seconds[row]).all(1) & (offers[kept] >= offers[row]).all(1)
        if np.isfinite(seconds[row]).any() and not cheaper.any():
            kept.append(int(row))
    return sorted(kept)
