"""The order in which variables are eliminated: it decides how large the tables become.

First goes the variable whose table is small and joins little that was apart (weighted min-fill: Darwiche, "Modeling and
Reasoning with Bayesian Networks", 2009, 6.8 and 9.3).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import attrs

FILL_WEIGHTS = (0.4, 1.0, 0.1)
"""How much the pairs of variables that an elimination joins count beside the size of its table. With the first a GPT
step needs a fifth of the cells of the order that takes the smallest table first; the others are for what it does not
suit."""

_HOPELESS = 64.0
"""The logarithm of a table's size above which nothing else about it matters: no such table is built."""


@attrs.frozen
class Order:
    """An order of elimination, and the cells of the largest table that it builds."""

    variables: tuple[int, ...]
    cells: int


@lru_cache(maxsize=8)
def elimination_order(domains: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], max_cells: int) -> Order:
    """An order that builds no table of more than `max_cells` cells, if one is found.

    Args:
        domains: the number of choices of every variable.
        scopes: the variables of every table.
        max_cells: the largest table that may be built.
    """
    neighbours: list[set[int]] = [set() for _ in domains]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(other for other in scope if other != variable)
    orders: list[Order] = []
    for weight in FILL_WEIGHTS:
        orders.append(_Orderer(domains, neighbours, weight).run())
        if orders[-1].cells <= max_cells:
            return orders[-1]
    return min(orders, key=lambda order: order.cells)


class _Orderer:
    def __init__(self, domains: Sequence[int], neighbours: Sequence[set[int]], weight: float) -> None:
        self.domains = domains
        self.logs = [math.log(count) if count else 0.0 for count in domains]
        self.neighbours = [set(others) for others in neighbours]
        self.weight = weight

    def run(self) -> Order:
        heap = [(self.score(variable), variable) for variable in range(len(self.domains))]
        heapq.heapify(heap)
        done = [False] * len(self.domains)
        order, widest = [], 0
        while heap:
            score, variable = heapq.heappop(heap)
            if done[variable] or score != self.score(variable):
                continue
            done[variable] = True
            order.append(variable)
            near = self.neighbours[variable]
            widest = max(widest, self.domains[variable] * math.prod(self.domains[other] for other in near))
            for other in sorted(self.eliminate(variable)):
                heapq.heappush(heap, (self.score(other), other))
        return Order(tuple(order), widest)

    def eliminate(self, variable: int) -> set[int]:
        """Join the neighbours of a variable and take it out; the variables that get another score."""
        near = self.neighbours[variable]
        affected = set(near)
        # Beside the neighbours, only those between two that become neighbours of each other.
        for one, other in combinations(sorted(near), 2):
            if other not in self.neighbours[one]:
                affected |= self.neighbours[one] & self.neighbours[other]
        for other in near:
            self.neighbours[other] |= near
            self.neighbours[other] -= {variable, other}
        self.neighbours[variable] = set()
        return affected - {variable}

    def score(self, variable: int) -> float:
        """The logarithm of the table's size, and of the pairs that become neighbours."""
        logs, neighbours = self.logs, sorted(self.neighbours[variable])
        size, fill = logs[variable] + sum(logs[other] for other in neighbours), 0.0
        if size > _HOPELESS:
            return size
        for position, other in enumerate(neighbours):
            near = self.neighbours[other]
            apart = [logs[third] for third in neighbours[position + 1 :] if third not in near]
            fill += logs[other] * sum(apart)
        return size + self.weight * fill
