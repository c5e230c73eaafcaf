"""The predicted time of a step in which communication passes beside computation, as processes run it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import attrs

from spmd.collectives.primitive import Collective
from spmd.collectives.primitives import KINDS
from spmd.ir.graph import Operation
from spmd.plan.cost.account import Account, account
from spmd.plan.cost.buckets import copying_seconds
from spmd.plan.data.plan import PlanData
from spmd.plan.local.calls import scheduled
from spmd.plan.machine.machine import Machine
from spmd.plan.memory.in_flight import PlacedLaunch, happenings_of, launches, ranks_like
from spmd.plan.memory.launch_buffers import LaunchBuffers, launch_buffers
from spmd.plan.memory.liveness import Liveness, record


@attrs.frozen
class Timing:
    """Predicted seconds of one run.

    Args:
        step: all of it.
        compute: what operators take.
        communication: what launches take, each with its latency, and the copies to and from buckets.
        exposed: the part of the step in which a rank waits for communication and computes nothing.
    """

    step: float
    compute: float
    communication: float
    exposed: float


@attrs.frozen(eq=False)
class Simulation:
    """One run of a plan: operators one after the other, and one stream of launches for each mesh axis.

    Args:
        liveness: what a rank runs, in order.
        seconds: what each call of an operator takes, by its first operation.
    """

    liveness: Liveness
    seconds: Mapping[Operation, float]

    @classmethod
    def of(cls, plan: PlanData, found: Account) -> Simulation:
        """The simulation of a plan with any schedule, from its account."""
        units = scheduled(plan)
        return cls(record(plan), {unit.operations[0]: sum(found.seconds[o] for o in unit.operations) for unit in units})

    def timing(self, plan: PlanData) -> Timing:
        """The predicted times with the schedule of a plan.

        A launch begins where the runtime starts it, after earlier ones along its axes. The part of its time that
        `Machine.overlap` leaves stops computation, as does copying operands to buffers and results from them;
        `Link.wait` stops nothing but what needs the result.
        """
        machine, events = plan.request.machine, self.liveness.events
        ranks = ranks_like(plan, self.liveness.coordinate)
        happenings = happenings_of(launches(plan, self.liveness))
        comms = dict(zip((event for event in events if event.collective), plan.comms, strict=True))
        now = compute = communication = 0.0
        free: dict[str, float] = defaultdict(float)
        ends: dict[PlacedLaunch, float] = {}
        taken: set[Operation] = set()
        for index, event in enumerate((*events, None)):
            for launch, starts in happenings[index]:
                if not starts:
                    now = max(now, ends[launch])
                    continue
                sent = [comms[collective] for collective in launch.events]
                kind, axes = sent[0].kind, sent[0].axes
                takes = machine.sending_seconds(kind, axes, sum(comm.bytes for comm in sent))
                wait = machine.wait_seconds(kind, axes)
                copies = _copy_seconds(machine, KINDS[kind], len(sent), launch_buffers(plan.mesh, ranks, launch.calls))
                now += copies
                sent_at = max(now, *(free[axis] for axis in axes)) + takes
                free.update(dict.fromkeys(axes, sent_at))
                ends[launch] = sent_at + wait
                communication += copies + takes + wait
                now += (1 - machine.overlap) * takes
            if event is not None and event.operation not in taken:
                taken.add(event.operation)
                compute += self.seconds.get(event.operation, 0.0)
                now += self.seconds.get(event.operation, 0.0)
        return Timing(now, compute, communication, now - compute)


def timing_of(plan: PlanData) -> Timing:
    """The predicted times of one run of a plan."""
    return Simulation.of(plan, account(plan)).timing(plan)


def _copy_seconds(machine: Machine, collective: Collective, calls: int, buffers: LaunchBuffers) -> float:
    """Seconds of the copies to and from the buffers of a launch of so many collectives."""
    unpacking = () if collective.measured_results else buffers.unpacking
    written = sum(buffers.metas[number].nbytes for _, writes in buffers.packing + unpacking for number in writes)
    if collective.copies_operand and buffers.received != buffers.sent:
        written += buffers.metas[buffers.received].nbytes
    return copying_seconds(machine, calls if calls > 1 else 0, written)
