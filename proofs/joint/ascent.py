"""Sums of tables too wide for elimination: a dual bound rules most choices out, HiGHS decides among what is left.

Costs are moved between the tables, which keeps their sum, such that the least of each table add up to more and more
(sequential tree-reweighted message passing: Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", 2006). What they add up to is a bound on the sum; a choice with which it would pass that of an assignment
is in none that is better.
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
"""How far above the bound the optimum is looked for, as parts of it; the next where there is none."""

CHECK = 10
"""Sweeps between two looks at the progress of the ascent."""

PROGRESS = 1e-6
"""The ascent ends when it has raised the bound by less than this part of it and has ruled out nothing more."""


def minimize_by_ascent(domains: Sequence[int], tables: Sequence[Table], below: float = math.inf) -> Solution | None:
    """The assignment that minimises the sum of the tables; None if none has less than `below`.

    Args:
        domains: as for `spmd.plan.solver.elimination.minimize`. The ascent is fast if variables of near numbers share
            tables.
        tables: cost tables of one or two variables, none negative.
        below: only assignments that cost less are looked for.
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
    """The best assignment of choices that are kept, by HiGHS; None if there is none."""
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
    """A table of two variables, whose costs come and go."""

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
    """Tables with the same sum as the given ones, up to choices that were ruled out: none negative, beside `bound`."""

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
        """The same, to be changed on its own."""
        copied = _Dual([len(costs) for costs in self.single], ())
        copied.bound, copied.single = self.bound, [costs.copy() for costs in self.single]
        for pair in self.pairs:
            copied._touch(_Pair(pair.variables, pair.costs.copy()))
        return copied

    def may_reach(self, limit: float) -> bool:
        """Whether the bound leaves it open that an assignment is possible and costs at most `limit`."""
        return self.bound <= limit and math.isfinite(self.bound)

    def kept(self) -> list[torch.Tensor]:
        """The choices of every variable that are not ruled out."""
        return [torch.from_numpy(np.flatnonzero(np.isfinite(costs))) for costs in self.single]

    def ascend(self, limit: float) -> None:
        """Raise the bound as far as it goes, and rule out what is in no assignment of at most `limit`."""
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
        """For every variable, collect what its tables say, and hand it on to those with variables still to come."""
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
        """Move into the costs of one variable what can be moved there without any becoming negative."""
        costs = self.single[variable]
        for pair, dim in self.touching[variable]:
            least = pair.least(dim)
            pair.add(dim, -np.where(np.isfinite(least), least, 0.0))
            costs = costs + least
        return costs
