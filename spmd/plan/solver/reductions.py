"""Reductions: variables with at most two neighbours are eliminated first, and only the remaining core is searched.

A variable without neighbours takes its cheapest choice. One with a single neighbour becomes a cost of that neighbour's
choices. One with two neighbours becomes a table between them. None of these makes a table of more than two variables,
and they eliminate most variables of a program.

Source: the rules R0, RI and RII of partitioned Boolean quadratic programming; Scholz and Eckstein, "Register allocation
for irregular architectures" (2002).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import attrs
import torch

from spmd.plan.solver.table import Table


@attrs.frozen(eq=False)
class Reduction:
    """The problem that remains after the reductions.

    Args:
        core: the remaining variables, ascending.
        domains: the number of choices of each of them.
        tables: their cost tables; variables are numbered by their positions in `core`.
        constant: the cost that does not depend on the core.
        steps: for every eliminated variable, in order: the variable, its neighbours at that time, and its best choice
            for every combination of their choices (nested lists).
    """

    core: tuple[int, ...]
    domains: tuple[int, ...]
    tables: tuple[Table, ...]
    constant: float
    steps: tuple[tuple[int, tuple[int, ...], Any], ...]

    @property
    def scopes(self) -> tuple[tuple[int, ...], ...]:
        """The variables of every table."""
        return tuple(table.variables for table in self.tables)

    def complete(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """The choices of all variables, from those of the core."""
        choices = [0] * (len(self.core) + len(self.steps))
        for variable, choice in zip(self.core, chosen, strict=True):
            choices[variable] = choice
        for variable, neighbours, best in reversed(self.steps):
            for other in neighbours:
                best = best[choices[other]]
            choices[variable] = best
        return tuple(choices)


def reduce(domains: Sequence[int], tables: Sequence[Table], max_cells: int) -> Reduction:
    """Eliminate the variables that have at most two neighbours and are in no table of more than two variables.

    Args:
        domains: the number of choices of every variable.
        tables: cost tables over variables `0 .. len(domains) - 1`.
        max_cells: the cells of the largest table to build.
    """
    reducer = _Reducer(domains, max_cells)
    for table in tables:
        reducer.add(table)
    return reducer.run()


class _Reducer:
    """The remaining costs: of each variable, and between two variables, stored for both.

    Identical layers of a program share their table objects, so each result is cached by the identity of its tables.
    """

    def __init__(self, domains: Sequence[int], max_cells: int) -> None:
        self.domains = domains
        self.max_cells = max_cells
        self.constant = 0.0
        self.single: list[torch.Tensor | None] = [None for _ in domains]
        self.pairs: list[dict[int, torch.Tensor]] = [{} for _ in domains]
        self.wide: list[Table] = []  # over more than two variables, none of which is reduced
        self.steps: list[tuple[int, tuple[int, ...], Any]] = []
        # Caches by the identity (`id`) of tables; each entry holds references to them, so that ids stay unique.
        self.views: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        self.totals: dict[Hashable, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.turned: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.reduced: dict[Hashable, tuple[Any, Any, Any]] = {}

    def add(self, table: Table) -> None:
        """Add a table, without its variables of a single choice."""
        variables = tuple(variable for variable in table.variables if self.domains[variable] > 1)
        costs = table.costs
        if len(variables) < len(table.variables):
            shape = tuple(self.domains[variable] for variable in variables)
            key = (id(costs), shape)
            if key not in self.views:
                self.views[key] = costs.reshape(shape), costs
            costs = self.views[key][0]
        if not variables:
            self.constant += float(costs)
        elif len(variables) == 1:
            self.add_single(variables[0], costs)
        elif len(variables) == 2:
            self.add_pair(*variables, costs)
        else:
            self.wide.append(Table(variables, costs))

    def total(self, one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        if one is None:
            return other
        key = (id(one), id(other))
        if key not in self.totals:
            self.totals[key] = one + other, one, other
        return self.totals[key][0]

    def add_single(self, variable: int, costs: torch.Tensor) -> None:
        self.single[variable] = self.total(self.single[variable], costs)

    def add_pair(self, one: int, other: int, costs: torch.Tensor) -> None:
        costs = self.total(self.pairs[one].get(other), costs)
        self.pairs[one][other] = costs
        if id(costs) not in self.turned:
            turned = costs.T.contiguous()
            self.turned[id(costs)], self.turned[id(turned)] = (turned, costs), (costs, turned)
        self.pairs[other][one] = self.turned[id(costs)][0]

    def run(self) -> Reduction:
        held = {variable for table in self.wide for variable in table.variables}
        done = [variable in held for variable in range(len(self.domains))]
        waiting = deque(range(len(self.domains)))
        while waiting:
            variable = waiting.popleft()
            if done[variable] or len(self.pairs[variable]) > 2:
                continue
            neighbours = tuple(sorted(self.pairs[variable]))
            if len(neighbours) == 2 and not self.fits(variable, *neighbours):
                continue
            done[variable] = True
            self.reduce(variable, neighbours)
            waiting.extend(neighbours)
        reduced = {variable for variable, _, _ in self.steps}
        core = tuple(variable for variable in range(len(self.domains)) if variable not in reduced)
        domains = tuple(self.domains[variable] for variable in core)
        return Reduction(core, domains, tuple(self.left(core)), self.constant, tuple(self.steps))

    def fits(self, variable: int, one: int, other: int) -> bool:
        return self.domains[variable] * self.domains[one] * self.domains[other] <= self.max_cells

    def reduce(self, variable: int, neighbours: tuple[int, ...]) -> None:
        """Eliminate a variable: replace its tables by one cost table over its neighbours."""
        tables = [self.pairs[variable].pop(other) for other in neighbours]
        for other in neighbours:
            del self.pairs[other][variable]
        own = self.single[variable]
        self.single[variable] = None
        key = (self.domains[variable], id(own), *map(id, tables))
        if key not in self.reduced:
            self.reduced[key] = *self.eliminated(self.domains[variable], own, tables), (own, tables)
        costs, best, _ = self.reduced[key]
        self.steps.append((variable, neighbours, best))
        if not neighbours:
            self.constant += costs
        elif len(neighbours) == 1:
            self.add_single(neighbours[0], costs)
        else:
            self.add_pair(neighbours[0], neighbours[1], costs)

    def eliminated(self, count: int, own: torch.Tensor | None, tables: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """For every combination of the neighbours' choices, the least cost and the choice that attains it."""
        total = torch.zeros(count, dtype=torch.float64) if own is None else own
        for place, table in enumerate(tables):
            total = total.unsqueeze(-1) + table.reshape(count, *[1] * place, -1)
        costs, best = total.min(0)
        return (costs if tables else float(costs)), best.tolist()

    def left(self, core: Sequence[int]) -> list[Table]:
        """The remaining tables, with variables numbered by their positions in the core."""
        places = {variable: place for place, variable in enumerate(core)}
        tables = [Table(tuple(places[v] for v in table.variables), table.costs) for table in self.wide]
        for place, variable in enumerate(core):
            own = self.single[variable]
            if own is not None:
                tables.append(Table((place,), own))
            pairs = sorted(self.pairs[variable].items())
            tables += [Table((place, places[other]), costs) for other, costs in pairs if other > variable]
        return tables
