"""The predicted time of a step in which communication passes beside computation, as processes run it."""

from __future__ import annotations

from collections import defaultdict

import attrs

from spmd.plan.cost.account import account
from spmd.plan.data.plan import PlanData
from spmd.plan.local.calls import scheduled
from spmd.plan.memory.in_flight import Launch, launches
from spmd.plan.memory.liveness import record


@attrs.frozen
class Timing:
    """Predicted seconds of one run.

    Args:
        step: all of it.
        compute: what operators take.
        communication: what launches take, each with its latency.
        exposed: the part of the step in which a rank waits for communication and computes nothing.
    """

    step: float
    compute: float
    communication: float
    exposed: float


def timing_of(plan: PlanData) -> Timing:
    """Simulate one run of a plan: operators one after the other, and one stream of launches for each mesh axis.

    A launch begins where the runtime starts it, after earlier ones along its axes; the part of its time that
    `Machine.overlap` leaves stops computation.
    """
    liveness, machine, seconds = record(plan), plan.request.machine, _seconds(plan)
    starts: dict[int, list[Launch]] = defaultdict(list)
    finishes: dict[int, list[Launch]] = defaultdict(list)
    for launch in launches(plan, liveness):
        starts[launch.start].append(launch)
        finishes[launch.finish].append(launch)
    comms = dict(zip((event for event in liveness.events if event.collective), plan.comms, strict=True))
    now = compute = communication = 0.0
    free: dict[str, float] = defaultdict(float)
    ends: dict[Launch, float] = {}
    for index, event in enumerate((*liveness.events, None)):
        for launch in starts[index]:
            sent = [comms[collective] for collective in launch.events]
            takes = machine.collective_seconds(sent[0].kind, sent[0].axes, sum(comm.bytes for comm in sent))
            ends[launch] = max(now, *(free[axis] for axis in sent[0].axes)) + takes
            free.update(dict.fromkeys(sent[0].axes, ends[launch]))
            communication += takes
            now += (1 - machine.overlap) * takes
        for launch in finishes[index]:
            now = max(now, ends[launch])
        if event is not None:
            taken = seconds.pop(event.operation, 0.0)
            compute += taken
            now += taken
    return Timing(now, compute, communication, now - compute)


def _seconds(plan: PlanData) -> dict[object, float]:
    """The seconds of each call that a rank makes, by its first operation."""
    found = account(plan).seconds
    return {unit.operations[0]: sum(found[o] for o in unit.operations) for unit in scheduled(plan)}
