"""An independent check of the planner's search: the same cost tables as an integer program, solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from spmd.errors import PlanError
from spmd.plan.data.request import Request
from spmd.plan.search.options import SearchOptions
from spmd.plan.search.orders import plan
from spmd.plan.solver.elimination import Solution, minimize
from spmd.plan.solver.table import Table


class InfeasibleError(PlanError):
    """No assignment has a finite cost."""


MICROSECOND = 1e-6
"""The default unit of the costs that HiGHS is given: seconds are too small for its absolute tolerances."""

_INFEASIBLE = 2
"""The status of `scipy.optimize.milp` for an infeasible problem."""


@attrs.frozen(eq=False)
class Search:
    """One minimization problem that the planner solved, and its solution."""

    domains: tuple[int, ...]
    tables: tuple[Table, ...]
    solution: Solution

    def optimum(self) -> float:
        """The least cost by HiGHS."""
        return solve_by_highs(self.domains, self.tables, 1e-3 * self.solution.cost or MICROSECOND).cost


def searches_of(request: Request) -> list[Search]:
    """The exact searches of a plan, one for each mesh axis of each order."""
    found: list[Search] = []

    def record(domains: Sequence[int], tables: Sequence[Table]) -> Solution:
        solution = minimize(domains, tables)
        found.append(Search(tuple(domains), tuple(tables), solution))
        return solution

    plan(request, SearchOptions(minimize=record))
    return found


def solve_by_highs(domains: Sequence[int], tables: Sequence[Table], unit: float = MICROSECOND) -> Solution:
    """The assignment of least cost, as an integer program.

    There is a binary variable for every choice, and a continuous variable for every finite cell of a table. The cells
    of a table are the marginal distribution of its variables: the cells of one choice add up to the choice's binary
    variable (Koller and Friedman, "Probabilistic Graphical Models", 2009, 13.5).

    Args:
        domains: the number of choices of every variable.
        tables: as for `spmd.plan.solver.elimination.minimize`.
        unit: the unit of costs in the integer program; HiGHS's optimum is exact to a millionth of it.

    Raises:
        InfeasibleError: no assignment has a finite cost.
        PlanError: HiGHS finds no optimum for another reason.
    """
    offsets = np.concatenate([[0], np.cumsum(domains)])
    program = _Program(int(offsets[-1]))
    for variable, count in enumerate(domains):
        program.constrain(np.arange(count) + offsets[variable], np.ones(count), 1.0)
    for table in tables:
        costs = table.costs.numpy() / unit
        cells = np.argwhere(np.isfinite(costs))
        if costs.ndim == 1:
            (variable,) = table.variables
            program.upper[offsets[variable] : offsets[variable + 1]][~np.isfinite(costs)] = 0.0
            program.costs[offsets[variable] : offsets[variable + 1]] += np.where(np.isfinite(costs), costs, 0.0)
            continue
        columns = program.add(costs[np.isfinite(costs)])
        for dim, variable in enumerate(table.variables):
            for choice in range(domains[variable]):
                with_it = columns[cells[:, dim] == choice]
                program.constrain(
                    np.append(with_it, offsets[variable] + choice), np.append(np.ones(len(with_it)), -1.0), 0.0
                )
    cost, numbers = program.solve()
    chosen = np.split(numbers[: offsets[-1]], offsets[1:-1])
    return Solution(tuple(int(choice.argmax()) for choice in chosen), cost * unit)


class _Program:
    """An integer program of binary variables, continuous variables in [0, 1], and equality constraints."""

    def __init__(self, binaries: int) -> None:
        self.binaries = binaries
        self.costs, self.upper = np.zeros(binaries), np.ones(binaries)
        self.more: list[np.ndarray] = []
        self.count = binaries
        self.rows: list[tuple[np.ndarray, np.ndarray, float]] = []

    def add(self, costs: np.ndarray) -> np.ndarray:
        """Add continuous variables with these costs, and return their columns."""
        self.more.append(costs)
        self.count += len(costs)
        return np.arange(self.count - len(costs), self.count)

    def constrain(self, columns: np.ndarray, factors: np.ndarray, total: float) -> None:
        """Add the constraint that the sum of `factors` times the variables of `columns` is `total`."""
        self.rows.append((columns, factors, total))

    def solve(self) -> tuple[float, np.ndarray]:
        """The least cost, and the values of all variables that attain it."""
        starts = np.cumsum([0, *(len(columns) for columns, _, _ in self.rows)])
        matrix = csr_array(
            (
                np.concatenate([factors for _, factors, _ in self.rows]),
                np.concatenate([columns for columns, _, _ in self.rows]),
                starts,
            ),
            shape=(len(self.rows), self.count),
        )
        totals = np.array([total for _, _, total in self.rows])
        numbers = self.count - self.binaries
        found = milp(
            np.concatenate([self.costs, *self.more]),
            integrality=np.concatenate([np.ones(self.binaries), np.zeros(numbers)]),
            bounds=Bounds(0.0, np.concatenate([self.upper, np.ones(numbers)])),
            constraints=LinearConstraint(matrix, totals, totals),
            options={"mip_rel_gap": 1e-9},
        )
        if not found.success:
            error = InfeasibleError if found.status == _INFEASIBLE else PlanError
            raise error(f"HiGHS found no optimum: {found.message}")
        return float(found.fun), found.x
