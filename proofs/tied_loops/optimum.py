"""The least time of an unrolled program along one mesh axis, if all trips of a loop are sharded alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from proofs.oracle import MICROSECOND, solve_by_highs
from proofs.tied_loops.unroll import Unrolled, unroll
from spmd.core.placement import Shard
from spmd.ir.dataflow import independent_values
from spmd.ir.graph import Operation, Value
from spmd.plan.data.request import Request
from spmd.plan.search.options import SearchOptions
from spmd.plan.search.prepare import prepare
from spmd.plan.search.problem import AxisProblem
from spmd.plan.solver.elimination import Solution, minimize
from spmd.plan.solver.table import Table
from spmd.rules.strategy import Strategy

aten = torch.ops.aten

NEAR = 1e-6
"""The largest relative distance at which two times count as equal: HiGHS's own tolerance, and what breaks ties."""


@attrs.frozen
class Optima:
    """Least times in seconds, of launches that are not joined.

    Args:
        planned: of the program with loops, with the strategies that the planner's search finds.
        tied: of the unrolled program, by HiGHS.
    """

    planned: float
    tied: float

    @property
    def distance(self) -> float:
        """The relative distance between them."""
        return abs(self.planned - self.tied) / max(self.tied, MICROSECOND**2)


def optima(request: Request) -> Optima:
    """The optima of a program with loops, on a mesh of one axis of more than one rank.

    Operations of several trips that come from one operation of a loop have one strategy. Stacks are not sharded along
    their rows, as loops would not have them.
    """
    (axis,) = request.mesh.names
    alone = independent_values(request.graph)
    chosen = _problem(request, axis, alone).solve().strategies
    planned: list[float] = []

    def price(domains: Sequence[int], tables: Sequence[Table]) -> Solution:
        solution = minimize(domains, tables)
        planned.append(solution.cost)
        return solution

    _problem(request, axis, alone, chosen).solve(SearchOptions(minimize=price))
    unrolled = unroll(request.graph)
    alone = frozenset(value for value, origin in unrolled.origins.items() if origin in alone)
    problem = _problem(attrs.evolve(request, graph=unrolled.graph), axis, alone)
    tied: list[float] = []

    def solve(domains: Sequence[int], tables: Sequence[Table]) -> Solution:
        tie = _Tie(problem, unrolled, domains)
        found = list(map(tie.table, (*tables, *_of_rows(problem, unrolled))))
        tied.append(solve_by_highs(tie.domains, found, 1e-3 * planned[0] or MICROSECOND).cost)
        return Solution((0,) * len(domains), tied[0])

    problem.solve(SearchOptions(minimize=solve))
    return Optima(planned[0], tied[0])


def _problem(
    request: Request,
    axis: str,
    independent: frozenset[Value],
    only: Mapping[Operation, Strategy] = MappingProxyType({}),
) -> AxisProblem:
    """The planner's problem, in which every collective is a launch, without copies to a bucket and from it."""
    draft = attrs.evolve(prepare(request).draft((axis,)), independent=independent, latency_shares={})
    return AxisProblem(draft, axis, request.machine, only=only)


class _Tie:
    """The variables of a problem, of which some are one: the variable of the first trip."""

    def __init__(self, problem: AxisProblem, unrolled: Unrolled, domains: Sequence[int]) -> None:
        copies: dict[object, list[Operation]] = defaultdict(list)
        for operation in problem.variables:
            origins = tuple(unrolled.origins.get(value) for value in operation.tensors)
            copies[origins if any(origins) else operation].append(operation)
        self.domains = list(domains)
        self.one: dict[int, tuple[int, Sequence[int]]] = {}
        """For each variable, the one that it is, and its own choice for each choice of that; -1 where it has none."""
        for alike in copies.values():
            own = [problem.strategies[operation] for operation in alike]
            union = list(dict.fromkeys(_key(strategy) for strategies in own for strategy in strategies))
            first = problem.variables[alike[0]]
            self.domains[first] = len(union)
            for operation, strategies in zip(alike, own, strict=True):
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


def _of_rows(problem: AxisProblem, unrolled: Unrolled) -> Iterator[Table]:
    """Infinity where a stack is sharded along its rows."""
    results = {value for operation in unrolled.of_rows for value in operation.tensors}
    for operation, variable in problem.variables.items():
        if results.issuperset(operation.tensors):
            joins = operation.op is aten.stack.default
            options = [(each.results if joins else each.operands)[0] for each in problem.strategies[operation]]
            costs = [math.inf if option == Shard(0) else 0.0 for option in options]
            yield Table((variable,), torch.tensor(costs, dtype=torch.float64))
