"""Hubs: the placements in which a value with several uses is at hand, each paid for once."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import combinations, product

import attrs
import torch

from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.plan.cost.local_cost import MoveCost

Move = tuple[Placement, Placement]
"""From one placement to another, along the mesh axis that is being planned."""


@attrs.frozen(cache_hash=True)
class Hub:
    """The placements in which a value is at hand for its uses."""

    held: frozenset[Placement]

    def offers(self, wanted: Placement) -> bool:
        """Whether a use can have a placement without a further collective: from a replica, all others are local."""
        return wanted in self.held or Replicate() in self.held


@lru_cache(maxsize=4096)
def hub_choices(sources: tuple[Placement, ...], wanted: tuple[Placement, ...], acquire: int) -> tuple[Hub, ...]:
    """The hubs worth considering: a replica, of which every shard is a slice, or up to `acquire` shards.

    A pending reduction may be at hand besides shards, if the value can be produced so; it is never acquired, and beside
    a replica it would be of no use.
    """
    shards = tuple(state for state in wanted if isinstance(state, Shard))
    pending = [state for state in wanted if isinstance(state, Partial) and state in sources]
    single: list[Placement] = [Replicate(), *shards, *pending]
    sets: list[tuple[Placement, ...]] = [(state,) for state in single]
    sets += combinations(shards, 2) if acquire > 1 else ()
    sets += product(pending, shards)
    return tuple(Hub(frozenset(held)) for held in sets)


def plan_moves(source: Placement, hub: Hub, cost: MoveCost) -> tuple[tuple[Move, ...], float]:
    """The cheapest moves from the placement in which a value is produced to those of a hub, and their time.

    Infinite if the hub holds a pending reduction that the value is not produced with.
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
    """Seconds to fill each hub (columns) from the placement that each strategy of the producer leaves (rows)."""
    known = {source: [plan_moves(source, hub, cost)[1] for hub in hubs] for source in dict.fromkeys(sources)}
    return torch.tensor([known[source] for source in sources], dtype=torch.float64)


@lru_cache(maxsize=4096)
def offer_table(options: tuple[tuple[Placement, ...], ...], hubs: tuple[Hub, ...]) -> torch.Tensor:
    """Zero where a hub (columns) offers all that a strategy of a use (rows) wants, else infinity."""
    known = {
        option: [0.0 if all(map(hub.offers, option)) else math.inf for hub in hubs] for option in dict.fromkeys(options)
    }
    return torch.tensor([known[option] for option in options], dtype=torch.float64)


@lru_cache(maxsize=4096)
def edge_table(sources: tuple[Placement, ...], wanted: tuple[Placement, ...], cost: MoveCost) -> torch.Tensor:
    """Seconds from the placement that each strategy of the producer leaves (rows) to what each of the use wants."""
    known = {(s, w): cost.seconds(s, w) for s in dict.fromkeys(sources) for w in dict.fromkeys(wanted)}
    return torch.tensor([[known[s, w] for w in wanted] for s in sources], dtype=torch.float64)
