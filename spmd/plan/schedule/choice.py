"""The choice of a schedule of launches.

Large buckets save latencies; small ones start earlier and pass beside computation. Which is better is simulated.
"""

from __future__ import annotations

from spmd.core.mesh import Runtime
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.plan.cost.account import launched
from spmd.plan.data.plan import AnyPlan, PlanData
from spmd.plan.memory.limit import fits
from spmd.plan.schedule.timing import timing_of

_PARTS = (1, 2, 4, 8, 16)
"""By how much buckets are smaller than the largest."""


NEAR = 1.02
"""Schedules whose predicted steps are within this factor count as equally fast."""


def best_schedule(plan: AnyPlan, *others: AnyPlan) -> AnyPlan:
    """The plan with the schedule of the least predicted step, of those that fit in its request's memory limit.

    Of those that are equally fast, it is the one with the fewest launches. If none fits, every collective is launched
    alone and waited for at once. Virtual ranks launch nothing: their plan has the schedule with the largest buckets.

    Args:
        plan: the plan.
        others: other plans for the same request, of which one is taken if it is better.
    """
    candidates = [
        candidate
        for each in (plan, *others)
        for schedule in _schedules(each)
        if fits(candidate := launched(each, schedule))
    ]
    if len(candidates) < 2:
        return candidates[0] if candidates else launched(plan, None)
    steps = [timing_of(candidate).step for candidate in candidates]
    fast = [candidate for candidate, step in zip(candidates, steps, strict=True) if step <= NEAR * min(steps)]
    return min(fast, key=lambda candidate: sum({comm.launch: comm.times for comm in candidate.comms}.values()))


def _schedules(plan: PlanData) -> list[LaunchSchedule | None]:
    """The schedules to choose from; those that hold more come first."""
    largest = plan.request.machine.launch_schedule
    if plan.mesh.runtime is Runtime.VIRTUAL or not plan.comms:
        return [largest]
    sizes = [largest.bucket_bytes / parts for parts in _PARTS]
    ahead: list[LaunchSchedule | None] = [LaunchSchedule(size, size) for size in sizes]
    return ahead if plan.request.memory_limit is None else [*ahead, *(LaunchSchedule(size, 0.0) for size in sizes)]
