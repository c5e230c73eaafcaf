"""Hubs: the placements in which a value with several consumers is acquired.

A *hub* is the set of placements along one mesh axis in which such a value is made available. The reshard to each of
them is paid once, and every consumer takes the value from one of them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations, product

import attrs
import torch

from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.plan.cost.local_cost import MoveCost

Move = tuple[Placement, Placement]
"""A change of placement, as (source, target), along the mesh axis that is being planned."""


@attrs.frozen(cache_hash=True)
class Hub:
    """The placements in which a value is acquired for its consumers."""

    held: frozenset[Placement]

    def offers(self, wanted: Placement) -> bool:
        """Whether a consumer gets the placement `wanted` without a collective; a replica is sliced locally."""
        return wanted in self.held or Replicate() in self.held


@lru_cache(maxsize=4096)
def hub_choices(sources: tuple[Placement, ...], wanted: tuple[Placement, ...], acquire: int) -> tuple[Hub, ...]:
    """The hubs to choose from: a replica, from which every shard is a slice, or one or two shards.

    A partial placement is in a hub only if the value can be produced with it, alone or besides one shard. A replica
    already serves consumers that require a partial value.

    Args:
        sources: the placements in which the value can be produced.
        wanted: the placements that its consumers may require.
        acquire: the most shards in one hub, 1 or 2.
    """
    shards = tuple(state for state in wanted if isinstance(state, Shard))
    pending = [state for state in wanted if isinstance(state, Partial) and state in sources]
    single: list[Placement] = [Replicate(), *shards, *pending]
    sets: list[tuple[Placement, ...]] = [(state,) for state in single]
    sets += combinations(shards, 2) if acquire > 1 else ()
    sets += product(pending, shards)
    return tuple(Hub(frozenset(held)) for held in sets)


def plan_moves(source: Placement, hub: Hub, cost: MoveCost) -> tuple[tuple[Move, ...], float]:
    """The cheapest moves from the placement in which a value is produced to those of a hub, and their seconds.

    The time is infinite if the hub holds a partial placement and the value is produced in another one that is sharded
    or partial.
    """
    targets = sorted((state for state in hub.held if state != source), key=repr)
    if source == Replicate() or not targets:
        return (), 0.0
    if any(isinstance(state, Partial) for state in targets):
        return (), math.inf
    if len(targets) == 1:
        return ((source, targets[0]),), cost.seconds(source, targets[0])
    first, second = targets
    chains: list[tuple[Move, Move]] = [
        ((source, first), (source, second)),
        ((source, first), (first, second)),
        ((source, second), (second, first)),
    ]
    costs = [sum(cost.seconds(*move) for move in chain) for chain in chains]
    best = costs.index(min(costs))
    return chains[best], costs[best]


@lru_cache(maxsize=4096)
def hub_table(sources: tuple[Placement, ...], hubs: tuple[Hub, ...], cost: MoveCost) -> torch.Tensor:
    """Seconds to reach each hub (columns) from the placement that each strategy of the producer produces (rows)."""
    known = {source: [plan_moves(source, hub, cost)[1] for hub in hubs] for source in dict.fromkeys(sources)}
    return torch.tensor([known[source] for source in sources], dtype=torch.float64)


@lru_cache(maxsize=4096)
def offer_table(options: tuple[tuple[Placement, ...], ...], hubs: tuple[Hub, ...]) -> torch.Tensor:
    """Zero where a hub (columns) offers all placements that a strategy of a consumer (rows) requires, else infinity."""
    known = {
        option: [0.0 if all(map(hub.offers, option)) else math.inf for hub in hubs] for option in dict.fromkeys(options)
    }
    return torch.tensor([known[option] for option in options], dtype=torch.float64)


@lru_cache(maxsize=4096)
def edge_table(sources: tuple[Placement, ...], wanted: tuple[Placement, ...], cost: MoveCost) -> torch.Tensor:
    """Seconds of the move between a producer and its consumer, by the strategies of both.

    Rows are the placements that the strategies of the producer produce, columns those that the consumer's require.
    """
    known = {(s, w): cost.seconds(s, w) for s in dict.fromkeys(sources) for w in dict.fromkeys(wanted)}
    return torch.tensor([[known[s, w] for w in wanted] for s in sources], dtype=torch.float64)
