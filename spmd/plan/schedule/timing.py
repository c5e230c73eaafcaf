"""The predicted time of a step in which communication passes beside computation, as processes run it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

import attrs

from spmd.collectives.primitive import Collective
from spmd.collectives.primitives import KINDS
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.regions import stretches
from spmd.lowering.launches import Launch, PlacedCalls, Start, Wait, split_launches, with_records
from spmd.lowering.lower import rank_graph
from spmd.lowering.passes.aliases import Aliases
from spmd.plan.cost.account import account
from spmd.plan.cost.buckets import copying_seconds
from spmd.plan.data.of_program import of_program
from spmd.plan.data.plan import PlanData
from spmd.plan.local.strided import StridedCall
from spmd.plan.machine.machine import Machine
from spmd.plan.memory.launch_buffers import LaunchBuffers, launch_buffers
from spmd.plan.memory.liveness import ranks_like


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
        graph: the program of the rank at coordinate zero.
        calls: that of each collective, by its result, on the tensors of the rank.
        seconds: what each call of an operator takes, by its first operation.
        stretches: the collectives between bounds of regions.
    """

    graph: Graph
    calls: Mapping[Value, StridedCall]
    seconds: Mapping[Operation, float]
    stretches: tuple[PlacedCalls, ...]

    @staticmethod
    @of_program
    def of(plan: PlanData) -> Simulation:
        """The simulation of a plan with any schedule."""
        coordinate, found = (0,) * len(plan.mesh.names), account(plan)
        graph = rank_graph(plan, coordinate)
        aliases = Aliases(graph, (plan.mesh, plan.mesh.rank(coordinate)))
        collectives = (operation for operation in graph.operations if operation.annotations.comm is not None)
        calls = {operation.tensors[0]: aliases.call(operation) for operation in collectives}
        seconds = {unit.operations[0]: sum(found.seconds[o] for o in unit.operations) for unit in found.units}
        return Simulation(graph, calls, seconds, tuple(map(PlacedCalls.of, stretches(graph.operations))))

    def launched(self, plan: PlanData) -> Hashable:
        """When the launches of a plan start, and which collectives each has: all that its schedule decides."""
        numbers = tuple(comm.launch for comm in plan.comms)
        if plan.schedule is None:
            return numbers, None
        number, found = iter(numbers), []
        for stretch in self.stretches:
            groups: dict[int, list[Operation]] = defaultdict(list)
            for operation in stretch.calls:
                groups[next(number)].append(operation)
            launches = map(groups.__getitem__, sorted(groups))
            found.append(tuple(stretch.starts(launches, plan.schedule.window_bytes)))
        return numbers, tuple(found)

    def timing(self, plan: PlanData) -> Timing:
        """The predicted times with the schedule of a plan.

        A launch begins where the runtime starts it, after earlier ones along its axes. The part of its time that
        `Machine.overlap` leaves stops computation, as does copying operands to buffers and results from them;
        `Link.wait` stops nothing but what needs the result.
        """
        machine, graph = plan.request.machine, with_records(self.graph, plan.comms)
        if plan.schedule is not None:
            graph = split_launches(graph, plan.schedule.window_bytes)
        ranks = ranks_like(plan, (0,) * len(plan.mesh.names))
        now = compute = communication = 0.0
        free: dict[str, float] = defaultdict(float)
        ends: dict[Launch, float] = {}
        taken: set[Operation] = set()
        for operation in graph.operations:
            op, first = operation.op, operation.annotations.comm
            if isinstance(op, Wait):
                now = max(now, ends[op.launch])
                continue
            if first is not None:
                launch = op.launch if isinstance(op, Start) else Launch((operation,))
                axes, runs = first.axes, graph.regions.runs(operation)
                takes = runs * machine.sending_seconds(first.kind, axes, launch.bytes)
                wait = runs * machine.wait_seconds(first.kind, axes)
                buffers = launch_buffers(plan.mesh, ranks, tuple(map(self.calls.__getitem__, launch.results)))
                copies = runs * _copy_seconds(machine, KINDS[first.kind], len(launch.collectives), buffers)
                now += copies
                sent_at = max(now, *(free[axis] for axis in axes)) + takes
                free.update(dict.fromkeys(axes, sent_at))
                ends[launch] = sent_at + wait
                communication += copies + takes + wait
                now += (1 - machine.overlap) * takes
                if not isinstance(op, Start):
                    now = max(now, ends[launch])
            ran = operation.annotations.origin
            if ran is not None and ran not in taken:
                taken.add(ran)
                compute += self.seconds.get(ran, 0.0)
                now += self.seconds.get(ran, 0.0)
        return Timing(now, compute, communication, now - compute)


def timing_of(plan: PlanData) -> Timing:
    """The predicted times of one run of a plan."""
    return _timing(plan, Simulation.of(plan).launched(plan))


@of_program
def _timing(plan: PlanData, launched: Hashable) -> Timing:
    """The predicted times under any schedule whose launches are `launched` so."""
    return Simulation.of(plan).timing(plan)


def _copy_seconds(machine: Machine, collective: Collective, calls: int, buffers: LaunchBuffers) -> float:
    """Seconds of the copies to and from the buffers of a launch of so many collectives."""
    unpacking = () if collective.measured_results else buffers.unpacking
    written = sum(buffers.metas[number].nbytes for _, writes in buffers.packing + unpacking for number in writes)
    if collective.copies_operand and buffers.received != buffers.sent:
        written += buffers.metas[buffers.received].nbytes
    return copying_seconds(machine, calls if calls > 1 else 0, written)
