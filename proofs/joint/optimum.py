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
        order: the nesting of the mesh axes in the best plan, major first.
        seconds: its predicted time.
        plan: the planner's own plan with the same strategies; if its time is equal, the optimum is attainable.
    """

    order: tuple[str, ...]
    seconds: float
    plan: PlanData


def joint_optimum(request: Request, acquire: int = 2) -> Optimum:
    """The plan of least predicted time, over all nestings of the mesh axes and all decisions in each.

    Args:
        request: the program, specs and options to plan.
        acquire: how many states may be acquired for one value.

    Raises:
        PlanError: no plan satisfies the specs, or the request has a memory limit or `keep_sharded`, which are not
            supported here.
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
