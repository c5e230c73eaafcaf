"""A problem in which operations of one origin have one strategy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spmd.ir.graph import Operation, Value
from spmd.plan.search.problem import AxisProblem
from spmd.plan.solver.table import Table
from spmd.rules.strategy import Strategy


class Tie:
    """The variables of a problem, of which those of operations of one origin are one: that of the first of them.

    Args:
        problem: the problem.
        origins: what the results of operations come from; operations without an origin are not tied.
        domains: the number of choices of every variable of the problem.
    """

    def __init__(self, problem: AxisProblem, origins: Mapping[Value, object], domains: Sequence[int]) -> None:
        copies: dict[object, list[Operation]] = defaultdict(list)
        for operation in problem.variables:
            own = tuple(origins.get(value) for value in operation.tensors)
            copies[own if any(own) else operation].append(operation)
        self.domains = list(domains)
        self.one: dict[int, tuple[int, Sequence[int]]] = {}
        """For each variable, the one that it is, and its own choice for each choice of that; -1 where it has none."""
        for alike in copies.values():
            allowed = [problem.strategies[operation] for operation in alike]
            union = list(dict.fromkeys(_key(strategy) for strategies in allowed for strategy in strategies))
            first = problem.variables[alike[0]]
            self.domains[first] = len(union)
            for operation, strategies in zip(alike, allowed, strict=True):
                numbers = {_key(strategy): number for number, strategy in enumerate(strategies)}
                self.one[problem.variables[operation]] = first, [numbers.get(key, -1) for key in union]

    def table(self, table: Table) -> Table:
        """A table over the variables that its variables are."""
        costs, variables = table.costs, []
        for dim, variable in enumerate(table.variables):
            first, choices = self.one.get(variable, (variable, range(self.domains[variable])))
            costs = _chosen(costs, dim, choices)
            variables.append(first)
        kept = sorted(set(variables))
        return Table(tuple(kept), torch.einsum(costs, list(map(kept.index, variables)), list(range(len(kept)))))


def _key(strategy: Strategy) -> object:
    return strategy.operands, strategy.results, strategy.label


def _chosen(costs: Tensor, dim: int, choices: Sequence[int]) -> Tensor:
    """The rows of some choices; infinity for -1."""
    nothing = torch.full_like(costs.narrow(dim, 0, 1), math.inf)
    return torch.cat([costs, nothing], dim).index_select(
        dim, torch.tensor([each % (costs.shape[dim] + 1) for each in choices])
    )
