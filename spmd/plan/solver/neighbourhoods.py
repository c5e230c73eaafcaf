"""Large-neighbourhood search: where a problem is too large to be solved at once, windows of it are solved exactly.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems" (1998).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spmd.errors import PlanError
from spmd.plan.solver.elimination import MAX_CELLS, Solution, TooWideError, minimize
from spmd.plan.solver.table import Table

WINDOW = 600
"""The number of variables that are optimised at a time."""

_FORBIDDEN = (1e9, 1e6)
"""Seconds that stand for infinitely many, in tables of one variable and in others, while no assignment is allowed."""


def improve(
    domains: Sequence[int],
    tables: Sequence[Table],
    start: Sequence[int],
    order: Sequence[int],
    window: int = WINDOW,
    max_cells: int = MAX_CELLS,
) -> Solution:
    """A good assignment of a problem that is too large for `minimize`.

    Sweeps over windows of consecutive variables, which overlap by half; each window is solved exactly while all other
    variables stay fixed. Ends when a sweep does not lower the cost. A window that is too large itself is halved.

    Where the start is not allowed, what is forbidden costs much instead, so that sweeps lower the number of violations:
    first those of single variables, such as a value that is never gathered, then those of its consumers.

    Args:
        domains, tables, max_cells: as for `minimize`.
        start: the choice of every variable to start from.
        order: all variables, neighbours close to each other.
        window: the number of variables in a window.

    Raises:
        PlanError: no assignment of finite cost was found.
    """
    choices = list(start)
    cost = evaluate(tables, choices)
    if not math.isfinite(cost):
        tables = _relaxed(tables)
        cost = evaluate(tables, choices)
    touching: list[list[Table]] = [[] for _ in domains]
    for table in tables:
        for variable in table.variables:
            touching[variable].append(table)
    while True:
        for begin in range(0, len(order), max(window // 2, 1)):
            _solve_window(domains, touching, choices, order[begin : begin + window], max_cells)
        improved = evaluate(tables, choices)
        if not improved < cost:
            if cost >= min(_FORBIDDEN):
                raise PlanError("No assignment of strategies was found that satisfies the given specs and constraints.")
            return Solution(tuple(choices), cost)
        cost = improved


def _relaxed(tables: Sequence[Table]) -> list[Table]:
    """The tables with large costs in place of infinite ones; those that share costs still do."""
    known: dict[tuple[int, bool], torch.Tensor] = {}
    found = []
    for table in tables:
        single = len(table.variables) == 1
        key = id(table.costs), single
        if key not in known:
            known[key] = table.costs.clamp(max=_FORBIDDEN[0 if single else 1])
        found.append(Table(table.variables, known[key]))
    return found


def evaluate(tables: Sequence[Table], choices: Sequence[int]) -> float:
    """The cost of an assignment: the sum of all tables at the choices of their variables."""
    return math.fsum(float(table.costs[tuple(choices[v] for v in table.variables)]) for table in tables)


def _solve_window(
    domains: Sequence[int],
    touching: Sequence[Sequence[Table]],
    choices: list[int],
    free: Sequence[int],
    max_cells: int,
) -> None:
    """Set the `free` variables in `choices` to their best choices, with all other variables fixed."""
    names = {variable: index for index, variable in enumerate(sorted(free))}
    inside = {id(table): table for variable in free for table in touching[variable]}
    try:
        found = minimize(
            [domains[variable] for variable in names],
            [_restrict(table, names, choices) for table in inside.values()],
            max_cells,
        )
    except TooWideError:
        if len(free) == 1:
            return
        middle = len(free) // 2
        _solve_window(domains, touching, choices, free[:middle], max_cells)
        _solve_window(domains, touching, choices, free[middle:], max_cells)
        return
    except PlanError:  # infeasible with the other variables as they are, which later windows may change
        return
    for variable, index in names.items():
        choices[variable] = found.choices[index]


def _restrict(table: Table, names: dict[int, int], choices: Sequence[int]) -> Table:
    """A table with the variables outside of the window fixed, and the others numbered by `names`."""
    index = tuple(slice(None) if variable in names else choices[variable] for variable in table.variables)
    costs: torch.Tensor = table.costs[index]
    return Table(tuple(names[variable] for variable in table.variables if variable in names), costs)
