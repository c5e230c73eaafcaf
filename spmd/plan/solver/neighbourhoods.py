"""Large-neighbourhood search: where a problem is too large to be solved at once, windows of it are solved exactly.

It searches the core that the reductions leave: the choices of all other variables follow from it, at their best.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems" (1998).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import torch

from spmd.errors import PlanError
from spmd.plan.solver.elimination import NoAssignmentError, Solution, TooWideError, minimize
from spmd.plan.solver.reductions import reduce
from spmd.plan.solver.table import Table

WINDOWS, WINDOW_CELLS = (75, 200), 2**20
"""The numbers of variables that are optimised at a time, in turn, and the largest table for that."""

_FORBIDDEN = (1e9, 1e6)
"""Seconds that stand for infinitely many while no assignment is allowed: in tables in which at most one variable has a
choice, and in others."""


def improve(
    domains: Sequence[int],
    tables: Sequence[Table],
    start: Sequence[int],
    order: Sequence[int],
    windows: Sequence[int] = WINDOWS,
    max_cells: int = WINDOW_CELLS,
) -> Solution:
    """A good assignment of a problem that is too large for `minimize`.

    Sweeps over windows of consecutive variables, which overlap by half; each window is solved exactly while all other
    variables stay fixed. Small and large windows take turns, which end elsewhere; the search ends when a sweep of each
    size in a row has not lowered the cost. A window that is too large itself is halved.

    Where the start is not allowed, what is forbidden costs much instead, so that sweeps lower the number of violations:
    first those of single variables, such as a value that is never gathered, then those of its consumers.

    Args:
        domains, tables, max_cells: as for `minimize`.
        start: the choice of every variable to start from.
        order: all variables, neighbours close to each other.
        windows: the numbers of variables of the core in a window, small ones first.

    Raises:
        NoAssignmentError: no assignment of finite cost was found.
    """
    if not math.isfinite(evaluate(tables, start)):
        tables = _relaxed(domains, tables)
    reduction = reduce(domains, tables, max_cells)
    places = {variable: place for place, variable in enumerate(reduction.core)}
    order = [places[variable] for variable in order if variable in places]
    choices = [start[variable] for variable in reduction.core]
    problem = _Windows(reduction.domains, reduction.tables, choices, max_cells)
    costs = [math.inf] * len(windows)
    for window in itertools.cycle(windows):
        costs.append(problem.sweep(order, window))
        if costs[-1] >= costs[-1 - len(windows)]:
            break
    cost = costs[-1]
    cost += reduction.constant
    if cost >= min(_FORBIDDEN):
        raise NoAssignmentError("No assignment of strategies was found that satisfies the given specs and constraints.")
    return Solution(reduction.complete(choices), cost)


def _relaxed(domains: Sequence[int], tables: Sequence[Table]) -> list[Table]:
    """The tables with large costs in place of infinite ones; those that share costs still do."""
    known: dict[tuple[int, bool], torch.Tensor] = {}
    found = []
    for table in tables:
        single = sum(domains[variable] > 1 for variable in table.variables) <= 1
        key = id(table.costs), single
        if key not in known:
            known[key] = table.costs.clamp(max=_FORBIDDEN[0 if single else 1])
        found.append(Table(table.variables, known[key]))
    return found


def evaluate(tables: Sequence[Table], choices: Sequence[int]) -> float:
    """The cost of an assignment: the sum of all tables at the choices of their variables."""
    return math.fsum(float(table.costs[tuple(choices[v] for v in table.variables)]) for table in tables)


class _Windows:
    """Windows of a problem: sets of variables that are optimised while all others stay as they are.

    Args:
        domains, tables, max_cells: as for `improve`.
        choices: the current choice of every variable, which `solve` updates.
    """

    def __init__(self, domains: Sequence[int], tables: Sequence[Table], choices: list[int], max_cells: int) -> None:
        self.domains, self.tables, self.choices, self.max_cells = domains, tables, choices, max_cells
        self.touching: list[list[Table]] = [[] for _ in domains]
        for table in tables:
            for variable in table.variables:
                self.touching[variable].append(table)
        self.solved: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...] | None]] = {}
        """For windows: the choices around them when they were solved, and theirs; () if there were none, None for a
        window that is too large."""

    def sweep(self, order: Sequence[int], window: int) -> float:
        """Solve windows of consecutive variables one after another; the cost after them."""
        for begin in range(0, len(order), max(window // 2, 1)):
            self.solve(order[begin : begin + window])
        return evaluate(self.tables, self.choices)

    def solve(self, free: Sequence[int]) -> None:
        """Set the variables in `free` to their best choices, with all others fixed; halves a window that is too large.

        A window with the same choices around it as when it was solved has the same best choices.
        """
        names = {variable: index for index, variable in enumerate(sorted(free))}
        inside = {id(table): table for variable in free for table in self.touching[variable]}
        outside = sorted({v for table in inside.values() for v in table.variables if v not in names})
        around = tuple(map(self.choices.__getitem__, outside))
        key = tuple(names)
        known, best = self.solved.get(key, (None, None))
        if known is None or (best is not None and known != around):
            best = self._best(names, list(inside.values()))
            self.solved[key] = around, best
        if best:
            for variable, choice in zip(names, best, strict=True):
                self.choices[variable] = choice
        elif best is None and len(free) > 1:
            self.solve(free[: len(free) // 2])
            self.solve(free[len(free) // 2 :])

    def _best(self, names: dict[int, int], tables: Sequence[Table]) -> tuple[int, ...] | None:
        """The best choices of a window; () if none is allowed, None if it is too large."""
        try:
            return minimize([self.domains[v] for v in names], self._restricted(tables, names), self.max_cells).choices
        except TooWideError:
            return None
        except PlanError:  # infeasible with the other variables as they are, which later windows may change
            return ()

    def _restricted(self, tables: Sequence[Table], names: dict[int, int]) -> list[Table]:
        """The tables with variables outside of the window fixed, and the others numbered by `names`.

        Tables that shared costs still do, by which the solver recognises identical layers.
        """
        known: dict[Hashable, torch.Tensor] = {}
        found = []
        for table in tables:
            index = tuple(slice(None) if variable in names else self.choices[variable] for variable in table.variables)
            costs = table.costs
            if any(isinstance(place, int) for place in index):
                key = (id(costs), *(place if isinstance(place, int) else None for place in index))
                costs = known[key] if key in known else known.setdefault(key, costs[index])
            found.append(Table(tuple(names[variable] for variable in table.variables if variable in names), costs))
        return found
