"""The elimination order of variables, which determines how large the tables become.

Greedy: next comes the variable whose elimination builds a small table and makes few new pairs of neighbours (weighted
min-fill: Darwiche, "Modeling and Reasoning with Bayesian Networks", 2009, 6.8 and 9.3).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

FILL_WEIGHTS = (0.4, 1.0, 0.1)
"""Weights of the new pairs of neighbours relative to the size of the table, tried in turn until an order fits. With the
first, a GPT step needs a fifth of the cells that it needs with weight 0; the others are for programs where the first
does badly."""

_HOPELESS = 64.0
"""The logarithm of a table's size above which its new pairs are not counted: no table of that size is ever built."""


def elimination_order(
    domains: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    max_cells: float,
    weights: Sequence[float] = FILL_WEIGHTS,
) -> tuple[int, ...] | None:
    """The variables in an order that builds no table of more than `max_cells` cells; None if none is found.

    Args:
        domains: the number of choices of every variable.
        scopes: the variables of every table.
        max_cells: the cells of the largest table that may be built; may be infinite.
        weights: those of `FILL_WEIGHTS` that are tried.
    """
    orders = (_order(domains, scopes, weight, max_cells) for weight in weights)
    return next((order for order in orders if order is not None), None)


@lru_cache(maxsize=256)
def _order(
    domains: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], weight: float, max_cells: float
) -> tuple[int, ...] | None:
    """The elimination order by one weight; windows of a search, and axes that are planned alike, ask for it again."""
    neighbours: list[set[int]] = [set() for _ in domains]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(other for other in scope if other != variable)
    return _Orderer(domains, neighbours, weight).run(max_cells)


class _Orderer:
    def __init__(self, domains: Sequence[int], neighbours: Sequence[set[int]], weight: float) -> None:
        self.domains = domains
        self.logs = [math.log(count) if count else 0.0 for count in domains]
        self.neighbours = [set(others) for others in neighbours]
        self.weight = weight

    def run(self, max_cells: float) -> tuple[int, ...] | None:
        scores = [self.score(variable) for variable in range(len(self.domains))]
        heap = [(score, variable) for variable, score in enumerate(scores)]
        heapq.heapify(heap)
        order = []
        while heap:
            score, variable = heapq.heappop(heap)
            if score != scores[variable]:
                continue
            if math.prod(map(self.domains.__getitem__, {variable, *self.neighbours[variable]})) > max_cells:
                return None
            scores[variable] = math.nan  # it is done
            order.append(variable)
            for other in sorted(self.eliminate(variable)):
                if (score := self.score(other)) != scores[other]:
                    scores[other] = score
                    heapq.heappush(heap, (score, other))
        return tuple(order)

    def eliminate(self, variable: int) -> set[int]:
        """Connect the neighbours of a variable and remove it; returns the variables whose score changes."""
        near = self.neighbours[variable]
        affected = set(near)
        # Besides the neighbours: common neighbours of two variables that become neighbours of each other.
        for one, other in combinations(sorted(near), 2):
            if other not in self.neighbours[one]:
                affected |= self.neighbours[one] & self.neighbours[other]
        for other in near:
            self.neighbours[other] |= near
            self.neighbours[other] -= {variable, other}
        self.neighbours[variable] = set()
        return affected - {variable}

    def score(self, variable: int) -> float:
        """The logarithm of the table's size, plus the weighted number of new pairs of neighbours; low goes first.

        A pair counts as the product of the logarithms of its domain sizes.
        """
        logs, neighbours = self.logs, sorted(self.neighbours[variable])
        size, fill = logs[variable] + sum(logs[other] for other in neighbours), 0.0
        if size > _HOPELESS:
            return size
        later = set(neighbours)
        for other in neighbours:
            later.discard(other)
            if apart := later - self.neighbours[other]:
                fill += logs[other] * sum(logs[third] for third in sorted(apart))
        return size + self.weight * fill
