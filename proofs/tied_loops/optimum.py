"""The least time of an unrolled program along one mesh axis, if all trips of a loop are sharded alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import attrs
import torch

from proofs.oracle import MICROSECOND, solve_by_highs
from proofs.tied_loops.tie import Tie
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
        tie = Tie(problem, unrolled.origins, domains)
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


def _of_rows(problem: AxisProblem, unrolled: Unrolled) -> Iterator[Table]:
    """Infinity where a stack is sharded along its rows."""
    results = {value for operation in unrolled.of_rows for value in operation.tensors}
    for operation, variable in problem.variables.items():
        if results.issuperset(operation.tensors):
            joins = operation.op is aten.stack.default
            options = [(each.results if joins else each.operands)[0] for each in problem.strategies[operation]]
            costs = [math.inf if option == Shard(0) else 0.0 for option in options]
            yield Table((variable,), torch.tensor(costs, dtype=torch.float64))
