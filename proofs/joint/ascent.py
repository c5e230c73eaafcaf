"""Minimizes sums of tables too wide for variable elimination: by a dual bound, and HiGHS for the choices that remain.

Dual ascent moves costs between the tables without changing their sum, such that the sum of the tables' minima grows
(sequential tree-reweighted message passing: Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", 2006). That sum of minima is a lower bound on the total cost. A choice that would raise the bound above a
cost limit is in no assignment within the limit, and is ruled out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from proofs.oracle import InfeasibleError, solve_by_highs
from spmd.plan.solver.elimination import Solution
from spmd.plan.solver.table import Table

MARGINS = (1e-3, 4e-3, 1.6e-2, 6.4e-2, math.inf)
"""Cost limits above the bound, relative to it, within which the optimum is searched for, one after the other."""

CHECK = 10
"""Sweeps between two checks of the progress of the ascent."""

PROGRESS = 1e-6
"""The ascent ends when the bound has grown by less than this fraction of it and no further choice was ruled out."""


def minimize_by_ascent(domains: Sequence[int], tables: Sequence[Table], below: float = math.inf) -> Solution | None:
    """The assignment that minimises the sum of the tables; None if no assignment costs less than `below`.

    Args:
        domains: as for `spmd.plan.solver.elimination.minimize`. The ascent is fast if variables that share a table have
            numbers close to each other.
        tables: cost tables of one or two variables, with no negative cost.
        below: the assignment must cost less than this.
    """
    dual = _Dual(domains, tables)
    dual.ascend(below)
    if not dual.may_reach(below):
        return None
    for margin in MARGINS:
        limit = min(below, dual.bound * (1 + margin)) if margin < math.inf else below
        pruned = dual.copy()
        pruned.ascend(limit)
        found = _solve(pruned.kept(), tables) if pruned.may_reach(limit) else None
        if found is not None and found.cost <= limit:
            return found if found.cost < below else None
        if limit == below:
            return None
    return None


def _solve(kept: Sequence[torch.Tensor], tables: Sequence[Table]) -> Solution | None:
    """The best assignment of the choices that are not ruled out, by HiGHS; None if no assignment is feasible."""
    smaller = []
    for table in tables:
        costs = table.costs
        for dim, variable in enumerate(table.variables):
            costs = costs.index_select(dim, kept[variable])
        smaller.append(Table(table.variables, costs))
    try:
        found = solve_by_highs([len(choices) for choices in kept], smaller)
    except InfeasibleError:
        return None
    choices = tuple(int(k[choice]) for k, choice in zip(kept, found.choices, strict=True))
    return Solution(choices, found.cost)


@attrs.define
class _Pair:
    """A table of two variables, whose costs the ascent changes."""

    variables: tuple[int, int]
    costs: np.ndarray

    def least(self, dim: int) -> np.ndarray:
        """The least cost with each choice of one of the variables."""
        found: np.ndarray = self.costs.min(axis=1 - dim)
        return found

    def add(self, dim: int, costs: np.ndarray) -> None:
        """Add a cost for each choice of one of the variables."""
        self.costs += costs[:, None] if dim == 0 else costs[None, :]


class _Dual:
    """Tables without negative costs that, plus `bound`, have the sum of the given ones, but for ruled-out choices."""

    def __init__(self, domains: Sequence[int], tables: Sequence[Table]) -> None:
        self.bound = 0.0
        self.single = [np.zeros(count) for count in domains]
        self.pairs: list[_Pair] = []
        self.touching: list[list[tuple[_Pair, int]]] = [[] for _ in domains]
        for table in tables:
            if len(table.variables) == 1:
                self.single[table.variables[0]] += table.costs.numpy()
            else:
                one, other = table.variables
                self._touch(_Pair((one, other), table.costs.numpy().copy()))

    def _touch(self, pair: _Pair) -> None:
        self.pairs.append(pair)
        for dim, variable in enumerate(pair.variables):
            self.touching[variable].append((pair, dim))

    def copy(self) -> _Dual:
        """An independent copy."""
        copied = _Dual([len(costs) for costs in self.single], ())
        copied.bound, copied.single = self.bound, [costs.copy() for costs in self.single]
        for pair in self.pairs:
            copied._touch(_Pair(pair.variables, pair.costs.copy()))
        return copied

    def may_reach(self, limit: float) -> bool:
        """Whether the bound does not exclude a feasible assignment that costs at most `limit`."""
        return self.bound <= limit and math.isfinite(self.bound)

    def kept(self) -> list[torch.Tensor]:
        """The choices of every variable that are not ruled out."""
        return [torch.from_numpy(np.flatnonzero(np.isfinite(costs))) for costs in self.single]

    def ascend(self, limit: float) -> None:
        """Raise the bound until it stops growing, and rule out choices that cannot be within `limit`."""
        before = (-math.inf, 0)
        while True:
            for _ in range(CHECK // 2):
                for forward in (True, False):
                    self._sweep(limit, forward)
                    if not self.may_reach(limit):
                        return
            now = (self.bound, sum(map(len, self.kept())))
            if now[0] - before[0] <= PROGRESS * now[0] and now[1] == before[1]:
                return
            before = now

    def _sweep(self, limit: float, forward: bool) -> None:
        """For each variable, collect the costs of its tables, then distribute them to tables with later variables."""
        numbers = range(len(self.single))
        for variable in numbers if forward else reversed(numbers):
            costs = self._collect(variable)
            least = costs.min()
            self.bound += least
            if not self.may_reach(limit):
                return
            costs -= least
            costs[self.bound + costs > limit] = math.inf
            ahead = [
                (pair, dim) for pair, dim in self.touching[variable] if (pair.variables[1 - dim] > variable) == forward
            ]
            share = costs / max(len(ahead), len(self.touching[variable]) - len(ahead), 1)
            for pair, dim in ahead:
                pair.add(dim, share)
            left = np.isfinite(costs)
            costs[left] = np.maximum(costs[left] - len(ahead) * share[left], 0.0)
            self.single[variable] = costs

    def _collect(self, variable: int) -> np.ndarray:
        """Move as much cost as possible from a variable's tables to its own costs; no cost becomes negative."""
        costs = self.single[variable]
        for pair, dim in self.touching[variable]:
            least = pair.least(dim)
            pair.add(dim, -np.where(np.isfinite(least), least, 0.0))
            costs = costs + least
        return costs
