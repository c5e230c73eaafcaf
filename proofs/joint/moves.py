"""Placements on all mesh axes together: what it takes to move between them, and which are worth acquiring for uses.

A move changes the placement on one axis, as every redistribution of a plan does, and costs what the search says of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, product

import attrs
import numpy as np

from spmd.core.mesh import Mesh
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.plan.cost.local_cost import MoveCost
from spmd.plan.data.draft import shrink
from spmd.plan.machine.machine import Machine

State = tuple[Placement, ...]
"""The placement of a value on each mesh axis, major first."""


@attrs.frozen(eq=False)
class Moves:
    """The cheapest ways between the states of a value.

    Args:
        states: all that the value can be in.
        seconds: from each state (rows) to each (columns); infinite where there is no way.
    """

    states: tuple[State, ...]
    seconds: np.ndarray

    def between(self, sources: Sequence[State], targets: Sequence[State]) -> np.ndarray:
        """Seconds from each source (rows) to each target (columns)."""
        return self.seconds[np.ix_(self.places(sources), self.places(targets))]

    def places(self, states: Sequence[State]) -> list[int]:
        """The positions of states among all."""
        known = {state: place for place, state in enumerate(self.states)}
        return [known[state] for state in states]


@attrs.frozen(eq=False)
class Acquired:
    """The sets of states that are worth acquiring for the uses of a value.

    Args:
        seconds: to have all states of each set (columns), from each source (rows).
        offers: whether a use gets each wanted state (columns) from each set (rows) without communication.
    """

    seconds: np.ndarray
    offers: np.ndarray


def find_moves(
    machine: Machine,
    mesh: Mesh,
    order: Sequence[str],
    sizes: tuple[int, ...],
    itemsize: int,
    given: Iterable[Placement],
) -> Moves:
    """The cheapest ways between all states of a value, by any number of moves (Floyd and Warshall, 1962).

    Args:
        machine: what moves cost.
        mesh: the mesh.
        order: its axes, major first.
        sizes: the logical shape of the value.
        itemsize: bytes an element.
        given: placements that the value is produced or wanted in, besides replicas and shards of dims that are longer
            than 1.
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
            return math.inf  # a minor axis cuts the dim that changes
        local = sizes
        for index in range(len(order)):
            if index != moved:
                local = shrink(local, source[index], counts[index])
        cost = MoveCost(machine, order[moved], counts[moved], local, itemsize)
        return cost.seconds(source[moved], target[moved])

    best = np.array([[seconds(source, target) for target in states] for source in states])
    for middle in range(len(states)):
        best = np.minimum(best, best[:, middle, None] + best[None, middle])
    return Moves(states, best)


def find_acquired(moves: Moves, sources: Sequence[State], wanted: Sequence[State], most: int) -> Acquired:
    """The sets of up to `most` states worth acquiring: no other is as cheap from all sources and offers as much.

    All states of a set are paid for once, on the cheapest tree of moves (Dreyfus and Wagner, 1971).
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
    """Seconds of the cheapest tree from every state to all that are chosen: a way, and two smaller trees at its end."""
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
