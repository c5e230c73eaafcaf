"""Exact minimisation of a sum of small cost tables, by variable elimination.

Each table speaks of a few variables with small domains. A variable is eliminated by adding up the tables that mention
it and minimising over it, which leaves one table over its neighbours (bucket elimination: Dechter, "Bucket
elimination", 1999). Choices are read off in reverse.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import attrs
import torch

from spmd.errors import PlanError
from spmd.plan.solver.ordering import Order, elimination_order
from spmd.plan.solver.reductions import Reduction, reduce
from spmd.plan.solver.table import Table

MAX_CELLS = 2**24
"""The largest table that elimination may build (128 MB of float64)."""


class TooWideError(PlanError):
    """An elimination would need a table of more than `MAX_CELLS` cells."""


@attrs.frozen
class Solution:
    """The cheapest choice for every variable, and its cost."""

    choices: tuple[int, ...]
    cost: float


def minimize(domains: Sequence[int], tables: Sequence[Table], max_cells: int = MAX_CELLS) -> Solution:
    """The assignment that minimises the sum of the tables.

    Ties break towards the lower choice of the variable that is decided first; nothing depends on hashes.

    Args:
        domains: the number of choices of every variable.
        tables: cost tables over variables `0 .. len(domains) - 1`.
        max_cells: the largest table to build.

    Raises:
        TooWideError: a table would pass `max_cells`.
        PlanError: no assignment has a finite cost.
    """
    reduction, order, buckets = _prepare(domains, tables, max_cells)
    if order.cells > max_cells:
        raise TooWideError(f"The search would need a table of {order.cells:.3g} cells (at most {max_cells:.3g}).")
    steps = [(variable, *buckets.eliminate(variable)) for variable in order.variables]
    cost = reduction.constant + buckets.constant
    if not math.isfinite(cost):
        raise PlanError("No assignment of strategies satisfies the given specs and constraints.")
    choices = [0] * len(reduction.core)
    for variable, rest, eliminated in reversed(steps):
        choices[variable] = int(eliminated.best[tuple(choices[other] for other in rest)])
    return Solution(reduction.complete(choices), cost)


def lower_bound(domains: Sequence[int], tables: Sequence[Table], max_cells: int = MAX_CELLS) -> float:
    """A cost that no assignment can be below, from tables of at most `max_cells` cells.

    A bucket too large to be joined is split into several, each of which chooses the variable for itself (mini-buckets:
    Dechter and Rish, 2003).
    """
    reduction, order, buckets = _prepare(domains, tables, max_cells)
    for variable in order.variables:
        buckets.relax(variable, max_cells)
    return reduction.constant + buckets.constant


def _prepare(domains: Sequence[int], tables: Sequence[Table], max_cells: int) -> tuple[Reduction, Order, _Buckets]:
    """What cheap reductions leave, in which order to eliminate it, and its tables."""
    reduction = reduce(domains, tables, max_cells)
    left = tuple(domains[variable] for variable in reduction.core)
    order = elimination_order(left, tuple(table.variables for table in reduction.tables), max_cells)
    return reduction, order, _Buckets(left, reduction.tables)


@attrs.frozen(eq=False)
class _Eliminated:
    """What is left of a bucket: the least cost for every combination of the neighbours, and the choice that has it.

    The tables of the bucket are kept, because buckets are known by the identity of their tables.
    """

    costs: torch.Tensor
    best: torch.Tensor
    bucket: tuple[torch.Tensor, ...]


class _Buckets:
    """The tables that are left, by variable, and the sum of those that no variable is left in."""

    def __init__(self, domains: Sequence[int], tables: Sequence[Table]) -> None:
        self.domains = domains
        self.constant = 0.0
        self.tables: list[dict[int, Table]] = [{} for _ in domains]
        self.count = 0
        self.known: dict[Hashable, _Eliminated] = {}
        for table in tables:
            self._add(table)

    def _add(self, table: Table) -> None:
        if not table.variables:
            self.constant += float(table.costs)
            return
        for variable in table.variables:
            self.tables[variable][self.count] = table
        self.count += 1

    def eliminate(self, variable: int) -> tuple[tuple[int, ...], _Eliminated]:
        """Put the message of a variable in place of all tables that mention it; returns the message's variables.

        Layers that are alike have buckets of the same tables in the same places, which are joined once.
        """
        bucket = self._bucket(variable)
        scope = tuple(sorted({variable, *(other for table in bucket for other in table.variables)}))
        place = {other: index for index, other in enumerate(scope)}
        key = (place[variable], *((id(table.costs), *map(place.__getitem__, table.variables)) for table in bucket))
        if key not in self.known:
            total = self._join(scope, bucket)
            costs, best = total.min(place[variable])
            self.known[key] = _Eliminated(costs, best.to(torch.int16), tuple(table.costs for table in bucket))
        found = self.known[key]
        rest = tuple(other for other in scope if other != variable)
        self._replace(variable, [Table(rest, found.costs)])
        return rest, found

    def relax(self, variable: int, max_cells: int) -> None:
        """Put messages of at most `max_cells` cells in place of all tables that mention a variable."""
        parts: list[tuple[set[int], list[Table]]] = []
        for table in reversed(self._bucket(variable)):
            for found, members in parts:
                if math.prod(self.domains[other] for other in found.union(table.variables)) <= max_cells:
                    found.update(table.variables)
                    members.append(table)
                    break
            else:
                parts.append((set(table.variables), [table]))
        messages = []
        for found, members in parts:
            scope = tuple(sorted(found))
            costs = self._join(scope, members[::-1]).amin(scope.index(variable))
            messages.append(Table(tuple(other for other in scope if other != variable), costs))
        self._replace(variable, messages)

    def _bucket(self, variable: int) -> list[Table]:
        """All tables that mention a variable. Small ones first: sums stay small until the last ones widen them."""
        return [t for _, t in sorted(self.tables[variable].items(), key=lambda item: (item[1].costs.numel(), item[0]))]

    def _join(self, scope: tuple[int, ...], bucket: Sequence[Table]) -> torch.Tensor:
        """The sum of tables over the variables of all of them."""
        shape = [self.domains[variable] for variable in scope]
        total = torch.zeros([1] * len(scope), dtype=torch.float64)
        for table in bucket:
            costs = table.costs.reshape([self.domains[v] if v in table.variables else 1 for v in scope])
            total = total.add_(costs) if list(total.shape) == shape else total + costs
        return total.expand(shape)

    def _replace(self, variable: int, messages: Sequence[Table]) -> None:
        """Put `messages` in place of all tables that mention a variable."""
        for key, table in self.tables[variable].items():
            for other in table.variables:
                if other != variable:
                    del self.tables[other][key]
        self.tables[variable] = {}
        for message in messages:
            self._add(message)
