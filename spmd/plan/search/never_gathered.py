"""Plans that gather what `keep_sharded` says to keep: they are refused, and an error says why there is no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spmd.collectives.primitives import KINDS
from spmd.core.placement import Shard
from spmd.errors import PlanError
from spmd.ir.graph import Operation
from spmd.ir.markers import REDISTRIBUTE
from spmd.plan.cost.account import account
from spmd.plan.data.draft import same_tensors
from spmd.plan.data.plan import PlanData
from spmd.plan.solver.elimination import NoAssignmentError


def allowed(plans: Sequence[PlanData]) -> list[PlanData]:
    """Those of several plans for one request that gather nothing which `keep_sharded` says to keep.

    Raises:
        NoAssignmentError: there is none.
    """
    found = [plan for plan in plans if not any(_gathers(plan))]
    if not found:
        raise NoAssignmentError("Every plan gathers arguments of keep_sharded.")
    return found


def refusal(plans: Sequence[PlanData]) -> PlanError:
    """The error for a request without an allowed plan: what has to be gathered, from the plan that gathers least."""
    plan = min(plans, key=lambda plan: len(list(_gathers(plan))))
    comms, request = account(plan).comms, plan.request
    lines = []
    for number, axes, operation in _gathers(plan):
        path = request.input_paths[number] if request.input_paths else request.graph.inputs[number].name
        gathers = (comm for comm in comms.get(operation, ()) if KINDS[comm.kind].gathers)
        lines += [f"  argument {path} along {', '.join(axes)}: {comm}\n" for comm in gathers]
    without = dict.fromkeys(f"{operation.op} at {operation.source}" for operation in plan.fallbacks)
    rule = f"\n  Without a sharding rule: {', '.join(without)}. rules=RULES | {{op: rule}} adds one." if without else ""
    return PlanError(
        f"keep_sharded cannot be met, as what reads these arguments does not run on their shards:\n{''.join(lines)}"
        "  Leave them out of keep_sharded, or change what requires them: the function, out_specs, a constraint, or the "
        f"in_specs of other arguments.{rule}"
    )


def _gathers(plan: PlanData) -> Iterator[tuple[int, list[str], Operation]]:
    """The redistributions that gather what is to be kept, each with the number of the argument and the axes."""
    for number, axes in plan.request.keep_sharded.items():
        kept = same_tensors(plan.graph, [plan.graph.inputs[number]])
        for operation in plan.graph.operations:
            if operation.op is REDISTRIBUTE:
                before, after = (plan.specs[value] for value in (*operation.operands, *operation.tensors))
                gathered = [
                    axis
                    for axis in sorted(axes)
                    if operation.operands[0] in kept
                    and isinstance(before.placement(axis), Shard)
                    and not isinstance(after.placement(axis), Shard)
                ]
                if gathered:
                    yield number, gathered, operation
