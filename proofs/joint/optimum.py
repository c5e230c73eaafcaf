"""The best plan of a program on all mesh axes together."""

from __future__ import annotations

import math
from itertools import permutations

import attrs

from proofs.joint.ascent import minimize_by_ascent
from proofs.joint.problem import JointProblem
from spmd.errors import PlanError
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request


@attrs.frozen(eq=False)
class Optimum:
    """The best of all plans.

    Args:
        order: the nesting of the mesh axes that has it, major first.
        seconds: its predicted time.
        plan: the planner's own plan with these strategies. That it takes as long shows that the optimum can be had.
    """

    order: tuple[str, ...]
    seconds: float
    plan: PlanData


def joint_optimum(request: Request, acquire: int = 2) -> Optimum:
    """The least predicted time of a program, over all nestings of its mesh axes and all that can be decided in each.

    Args:
        request: what is asked of the planner.
        acquire: how many states may be acquired for one value.

    Raises:
        PlanError: no plan satisfies the specs; or a memory limit or `keep_sharded`, which the oracle does not know.
    """
    best: Optimum | None = None
    for order in permutations(name for name, size in request.mesh.axes.items() if size > 1):
        problem = JointProblem(request, order, acquire)
        found = minimize_by_ascent(problem.domains, problem.tables, best.seconds if best else math.inf)
        if found is not None:
            best = Optimum(order, found.cost, problem.plan(found.choices))
    if best is None:
        raise PlanError("No assignment of strategies satisfies the given specs and constraints.")
    return best
