"""The least time of a small program if the layers between the first and the last have the same strategies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import attrs

from proofs.fuzz.program import default_dtype
from proofs.oracle import MICROSECOND, solve_by_highs
from proofs.page import table
from proofs.repeated_layers.compare import FOLDED, WHOLE, request_of
from proofs.repeated_layers.equal_layers import ties
from proofs.repeated_layers.programs import program
from proofs.tied_loops.optimum import NEAR
from proofs.tied_loops.tie import Tie
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import FREE
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.search.options import SearchOptions
from spmd.plan.search.orders import plan
from spmd.plan.search.prepare import prepare
from spmd.plan.search.problem import AxisProblem
from spmd.plan.solver.elimination import Solution, minimize
from spmd.plan.solver.table import Table
from spmd.rules.strategy import Strategy


@attrs.frozen
class Optima:
    """Least times in seconds along one mesh axis, as the planner's problem has them.

    Args:
        seed, name: the program.
        layers: how many results of operations are tied to those of an earlier layer.
        free: of all plans, by HiGHS.
        tied: of those in which the layers between the first and the last of each run are sharded alike, by HiGHS.
        whole, folded: with the strategies of the plans of the two searches.
        whole_gap, folded_gap: the distances from the optimum that these plans state.
    """

    seed: int
    name: str
    layers: int
    free: float
    tied: float
    whole: float
    folded: float
    whole_gap: float
    folded_gap: float

    @property
    def mistake(self) -> str:
        """The text of what cannot be, or is not as the plans state; empty if there is nothing."""
        if not _near(self.free, min(self.whole, self.folded, self.tied)):
            return "below the optimum"
        if not _near(self.whole, self.free * (1 + self.whole_gap)):
            return "the search of every layer is farther from the optimum than its plan states"
        if not _near(self.folded, self.tied * (1 + self.folded_gap)):
            return "the folded search is farther from the optimum with tied layers than its plan states"
        return ""


_TIES = 1e-12
"""Seconds of what breaks ties, `spmd.plan.search.problem.TIE` for each of up to a thousand choices."""


def _near(seconds: float, least: float) -> bool:
    """Test for a time that is at most another, but for HiGHS's tolerance and for what breaks ties."""
    return seconds <= least * (1 + NEAR) + _TIES


def optima(seed: int) -> Optima:
    """The optima of a seed's small program."""
    with default_dtype(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = program(seed, small=True)
        request = request_of(drawn)
    (axis,) = request.mesh.names
    tied_values = ties(request.graph)
    plans = [plan(request, attrs.evolve(each, joins=False, fewer_launches=False)) for each in (WHOLE, FOLDED)]
    whole, folded = (_least(_problem(request, axis, each)) for each in plans)
    free, tied = (_least(_problem(request, axis), origins, 1e-3 * whole) for origins in ({}, tied_values))
    shared = len(tied_values) - len(set(tied_values.values()))
    return Optima(seed, drawn.name, shared, free, tied, whole, folded, *(each.gap for each in plans))


def _problem(request: Request, axis: str, planned: PlanData | None = None) -> AxisProblem:
    """The planner's problem of every layer, in which the strategies are those of a plan, if one is given."""
    draft = prepare(request, WHOLE).draft((axis,))
    only: dict[Operation, Strategy] = {}
    if planned is not None:
        chosen = {operation.tensors: strategies[axis] for operation, strategies in planned.strategies.items()}
        mine = (each for each in draft.graph.operations if each not in draft.pinned and each.op is not FREE)
        only = {operation: chosen[operation.tensors] for operation in mine if operation.tensors in chosen}
    return AxisProblem(draft, axis, request.machine, only=only)


def _least(problem: AxisProblem, origins: Mapping[Value, object] | None = None, unit: float = MICROSECOND) -> float:
    """The least cost of a problem: by HiGHS with what operations come from, or with fixed strategies."""
    found: list[float] = []

    def solve(domains: Sequence[int], tables: Sequence[Table]) -> Solution:
        if origins is None:
            solution = minimize(domains, tables)
        else:
            tie = Tie(problem, origins, domains)
            solution = solve_by_highs(tie.domains, list(map(tie.table, tables)), unit)
        found.append(solution.cost)
        return Solution((0,) * len(domains), solution.cost)

    problem.solve(SearchOptions(minimize=solve))
    return found[0]


def line(found: Optima) -> str:
    """One program: its least times, and those of the plans."""
    free = found.free or _TIES
    parts = [("tied", found.tied), ("every layer", found.whole), ("folded", found.folded)]
    above = ", ".join(f"{name} {seconds / free - 1:+.3%}" for name, seconds in parts)
    gaps = f"gaps {found.whole_gap:.3g}, {found.folded_gap:.3g}"
    return ": ".join(filter(None, [f"tied {found.seed}", f"{free:.6g} s", above, gaps, found.mistake, found.name]))


def differs(found: Optima) -> bool:
    """Test for least times of which not all are the optimum."""
    return not _near(max(found.tied, found.whole, found.folded), found.free) or bool(found.mistake)


def summary(found: Sequence[Optima]) -> Iterator[str]:
    """Count the plans that are the optimum, with tied layers or of all, and say how far the others are."""

    def row(name: str, pairs: Sequence[tuple[float, float]]) -> tuple[str, str, str]:
        farthest = max((seconds / (least or _TIES) - 1 for seconds, least in pairs), default=0.0)
        return name, str(sum(_near(*pair) for pair in pairs)), f"{max(farthest, 0.0):.2%}"

    rows = [
        row("whose optimum with tied layers is the optimum", [(each.tied, each.free) for each in found]),
        row("whose plan of every layer is the optimum", [(each.whole, each.free) for each in found]),
        row("whose folded plan is the optimum", [(each.folded, each.free) for each in found]),
        row("whose folded plan is at most the optimum with tied layers", [(each.folded, each.tied) for each in found]),
    ]
    yield from table(("small programs", str(len(found)), "farthest"), rows)
    yield f"{sum(each.layers > 0 for each in found)} of them have tied layers"
