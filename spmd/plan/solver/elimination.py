"""Exact minimisation of a sum of small cost tables, by variable elimination.

Each table is a function of a few variables with small domains. A variable is eliminated by adding the tables that
mention it (its *bucket*) and minimising over it, which leaves one table (its *message*) over its neighbours, the other
variables of the bucket (bucket elimination: Dechter, "Bucket elimination", 1999). The choices follow in reverse order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import attrs
import torch

from spmd.errors import PlanError
from spmd.plan.solver.dominance import prune
from spmd.plan.solver.ordering import FILL_WEIGHTS, elimination_order
from spmd.plan.solver.reductions import reduce
from spmd.plan.solver.table import Table

MAX_CELLS = 2**24
"""The largest table that elimination may build (128 MB of float64)."""

NARROW = 2**16
"""The largest table up to which it is not worth while to look for dominated choices."""


class NoAssignmentError(PlanError):
    """No assignment has a finite cost."""


class TooWideError(PlanError):
    """An elimination would need a table of more cells than allowed."""


@attrs.frozen
class Solution:
    """An assignment: a choice for every variable, and their total cost."""

    choices: tuple[int, ...]
    cost: float


def minimize(domains: Sequence[int], tables: Sequence[Table], max_cells: int = MAX_CELLS) -> Solution:
    """The assignment that minimises the sum of the tables.

    The result is deterministic: ties break towards the lower choice of the variable that is decided first.

    Args:
        domains: the number of choices of every variable.
        tables: cost tables over variables `0 .. len(domains) - 1`.
        max_cells: the largest table to build.

    Raises:
        TooWideError: a table would have more than `max_cells` cells.
        NoAssignmentError: no assignment has a finite cost.
    """
    reduction = reduce(domains, tables, max_cells)
    order = elimination_order(reduction.domains, reduction.scopes, min(max_cells, NARROW), FILL_WEIGHTS[:1])
    if order is None:
        pruned = prune(reduction.domains, reduction.tables)
        if pruned.domains != reduction.domains:
            found = minimize(pruned.domains, pruned.tables, max_cells)
            return Solution(reduction.complete(pruned.restore(found.choices)), reduction.constant + found.cost)
        order = elimination_order(reduction.domains, reduction.scopes, max_cells)
    if order is None:
        raise TooWideError(f"The search would need a table of more than {max_cells:.3g} cells.")
    buckets = _Buckets(reduction.domains, reduction.tables)
    steps = [(variable, *buckets.eliminate(variable)) for variable in order]
    cost = reduction.constant + buckets.constant
    if not math.isfinite(cost):
        raise NoAssignmentError("No assignment of strategies satisfies the given specs and constraints.")
    choices = [0] * len(reduction.core)
    for variable, rest, eliminated in reversed(steps):
        choices[variable] = int(eliminated.best[tuple(choices[other] for other in rest)])
    return Solution(reduction.complete(choices), cost)


def lower_bound(domains: Sequence[int], tables: Sequence[Table], max_cells: int = MAX_CELLS) -> float:
    """A lower bound on the cost of every assignment, from tables of at most `max_cells` cells.

    A bucket whose tables together are too large is split into several, each of which is minimised over the variable on
    its own (mini-buckets: Dechter and Rish, 2003). Takes the arguments of `minimize`.
    """
    pruned = prune(domains, tables)
    reduction = reduce(pruned.domains, pruned.tables, max_cells)
    buckets = _Buckets(reduction.domains, reduction.tables)
    for variable in elimination_order(reduction.domains, reduction.scopes, math.inf) or ():
        buckets.relax(variable, max_cells)
    return reduction.constant + buckets.constant


@attrs.frozen(eq=False)
class _Eliminated:
    """The message of a bucket: for every combination of the neighbours' choices, the least cost and the best choice.

    It holds references to the bucket's tables, because the cache finds buckets by the identity of their tables.
    """

    costs: torch.Tensor
    best: torch.Tensor
    bucket: tuple[torch.Tensor, ...]


class _Buckets:
    """The remaining tables by variable, and the sum of those without variables."""

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
        """Replace all tables that mention a variable by its message; returns the message's variables and the message.

        Identical layers have buckets of the same tables in the same positions; each such message is computed once.
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
        """Replace all tables that mention a variable by messages from mini-buckets of at most `max_cells` cells."""
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
        """All tables that mention a variable, small ones first, so that partial sums stay small as long as possible."""
        return [t for _, t in sorted(self.tables[variable].items(), key=lambda item: (item[1].costs.numel(), item[0]))]

    def _join(self, scope: tuple[int, ...], bucket: Sequence[Table]) -> torch.Tensor:
        """The sum of tables, broadcast over the variables in `scope`."""
        shape = [self.domains[variable] for variable in scope]
        total = torch.zeros([1] * len(scope), dtype=torch.float64)
        for table in bucket:
            costs = table.costs.reshape([self.domains[v] if v in table.variables else 1 for v in scope])
            total = total.add_(costs) if list(total.shape) == shape else total + costs
        return total.expand(shape)

    def _replace(self, variable: int, messages: Sequence[Table]) -> None:
        """Replace all tables that mention a variable by `messages`."""
        for key, table in self.tables[variable].items():
            for other in table.variables:
                if other != variable:
                    del self.tables[other][key]
        self.tables[variable] = {}
        for message in messages:
            self._add(message)
