"""Choices that are never better than another one of the same variable are left out before a search.

A choice goes if another one costs no more whatever its neighbours choose: the sum, over the tables of the variable, of
the least difference of the two. What is left out at one variable makes more go at its neighbours.

Source: Goldstein, "Efficient rotamer elimination applied to protein side-chains and related spin glasses" (1994).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence

import attrs
import torch

from spmd.plan.solver.table import Table

Kept = tuple[int, ...]
"""The choices of a variable that are left, ascending."""


@attrs.frozen(eq=False)
class Pruned:
    """A problem without dominated choices; it has an optimum of the whole one.

    Args:
        kept: of every variable, the choices that are left; a choice is numbered by its position there.
        tables: the cost tables over these.
    """

    kept: tuple[Kept, ...]
    tables: tuple[Table, ...]

    @property
    def domains(self) -> tuple[int, ...]:
        """The number of choices of every variable."""
        return tuple(map(len, self.kept))

    def restore(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The choices of the whole problem, from those of this one."""
        return tuple(kept[choice] for kept, choice in zip(self.kept, choices, strict=True))


def prune(domains: Sequence[int], tables: Sequence[Table]) -> Pruned:
    """Leave out dominated choices; of equal ones the first stays.

    Args:
        domains: the number of choices of every variable.
        tables: cost tables over variables `0 .. len(domains) - 1`. Variables of tables over more than two keep all.
    """
    return _Pruner(domains, tables).run()


class _Pruner:
    """Equal layers share their tables, so what is found for one of them is found by the identity of its tables."""

    def __init__(self, domains: Sequence[int], tables: Sequence[Table]) -> None:
        self.tables = tables
        self.kept: list[Kept] = [tuple(range(count)) for count in domains]
        self.own: list[list[torch.Tensor]] = [[] for _ in domains]
        self.pairs: list[list[tuple[int, torch.Tensor]]] = [[] for _ in domains]
        self.fixed: set[int] = set()
        self.turned: dict[int, torch.Tensor] = {}
        self.parts: dict[Hashable, torch.Tensor] = {}
        self.found: dict[Hashable, Kept] = {}
        for table in tables:
            self.add(table)

    def add(self, table: Table) -> None:
        if len(table.variables) == 1:
            self.own[table.variables[0]].append(table.costs)
        elif len(table.variables) == 2:
            one, other = table.variables
            self.pairs[one].append((other, table.costs))
            self.pairs[other].append((one, self.turned.setdefault(id(table.costs), table.costs.T)))
        else:
            self.fixed.update(table.variables)

    def run(self) -> Pruned:
        waiting = deque(variable for variable in range(len(self.kept)) if variable not in self.fixed)
        queued = set(waiting)
        while waiting:
            variable = waiting.popleft()
            queued.discard(variable)
            if len(self.kept[variable]) > 1 and len(kept := self.undominated(variable)) < len(self.kept[variable]):
                self.kept[variable] = kept
                near = {other for other, _ in self.pairs[variable]} - queued - self.fixed
                waiting.extend(sorted(near))
                queued |= near
        return Pruned(tuple(self.kept), tuple(Table(table.variables, self.part(table)) for table in self.tables))

    def part(self, table: Table) -> torch.Tensor:
        """The costs of the choices that are left."""
        kept = tuple(self.kept[variable] for variable in table.variables)
        if tuple(map(len, kept)) == tuple(table.costs.shape):
            return table.costs
        key = (id(table.costs), kept)
        if key not in self.parts:
            self.parts[key] = _taken(table.costs, kept)
        return self.parts[key]

    def undominated(self, variable: int) -> Kept:
        kept = self.kept[variable]
        near = [(costs, self.kept[other]) for other, costs in self.pairs[variable]]
        own = self.own[variable]
        key = (kept, *map(id, own), *((id(costs), others) for costs, others in near))
        if key not in self.found:
            self.found[key] = _undominated(kept, own, near)
        return self.found[key]


def _taken(costs: torch.Tensor, kept: Sequence[Kept]) -> torch.Tensor:
    for dim, choices in enumerate(kept):
        if len(choices) < costs.shape[dim]:
            costs = costs.index_select(dim, torch.tensor(choices))
    return costs


def _undominated(kept: Kept, own: Sequence[torch.Tensor], near: Sequence[tuple[torch.Tensor, Kept]]) -> Kept:
    """The choices that no other one dominates, from the costs of a variable and those with its neighbours' choices.

    A difference of two infinite costs counts for nothing: neither choice is possible then.
    """
    worse = torch.zeros(len(kept), len(kept), dtype=torch.float64)
    for costs in own:
        costs = _taken(costs, (kept,))
        worse = worse + (costs.unsqueeze(1) - costs).nan_to_num_(math.inf, math.inf, -math.inf)
    for costs, others in near:
        costs = _taken(costs, (kept, others))
        least = (costs.unsqueeze(1) - costs).nan_to_num_(math.inf, math.inf, -math.inf).amin(2)
        worse = (worse + least).nan_to_num_(math.inf, math.inf, -math.inf)
    dead: set[int] = set()
    rows = worse.tolist()
    for one in reversed(range(len(kept))):
        if any(
            other not in dead and (rows[one][other] > 0 or (rows[one][other] == 0 and other < one))
            for other in range(len(kept))
            if other != one
        ):
            dead.add(one)
    return tuple(choice for number, choice in enumerate(kept) if number not in dead)
