"""The account of a finished plan: its collectives, and the predicted time of each of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from spmd.collectives.resharding import redistribution
from spmd.core.placement import Placement, Replicate
from spmd.core.spec import DTensorSpec
from spmd.ir.comm import Comm, Sent
from spmd.ir.graph import Operation, Value
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.ir.list_schedule import Unit
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.plan.cost.buckets import bucketed_seconds
from spmd.plan.cost.launches import Stretch, stretches_of, with_launches
from spmd.plan.cost.local_cost import LocalCost
from spmd.plan.data.assignment import Assignment
from spmd.plan.data.causes import cause_of
from spmd.plan.data.dataflow import fused_values, latency_shares
from spmd.plan.data.of_program import of_program
from spmd.plan.data.plan import AnyPlan, PlanData
from spmd.plan.local.calls import local_collectives, scheduled
from spmd.plan.local.copied_views import copied_views
from spmd.plan.machine.machine import Machine


@attrs.frozen
class Account:
    """The predicted times and the collectives of a plan's operations.

    Args:
        seconds: local time of each operation, without its collectives.
        comms: the collectives of each operation that has any, in the order in which a rank runs them.
        units: the calls that a rank makes, in order.
    """

    seconds: dict[Operation, float]
    comms: dict[Operation, tuple[Comm, ...]]
    units: tuple[Unit, ...]

    @property
    def all_comms(self) -> tuple[Comm, ...]:
        """Every collective, in order of execution."""
        return tuple(comm for comms in self.comms.values() for comm in comms)

    @property
    def total(self) -> float:
        """Predicted seconds of one run of the program."""
        return sum(self.seconds.values()) + sum(comm.seconds for comm in self.all_comms)


def account(plan: PlanData) -> Account:
    """The predicted times of every operation and every collective of a plan, on its request's machine."""
    return attrs.evolve(_without_launches(plan), comms=with_launches(_stretches(plan), plan.schedule))


@of_program
def _stretches(plan: PlanData) -> tuple[Stretch, ...]:
    """The collectives of a plan by stretches of its program."""
    found = _without_launches(plan)
    return stretches_of(plan, found.comms, found.units)


@of_program
def _without_launches(plan: PlanData) -> Account:
    """The account of a plan in which every collective is launched alone."""
    assignment = assignment_of(plan)
    cost = LocalCost.of(plan.request.machine, assignment)
    seconds = {
        operation: _cast_seconds(plan, operation) if operation.op is REDISTRIBUTE else cost.planned_seconds(operation)
        for operation in plan.graph.operations
    }
    trips, runs = plan.graph.regions.trips, plan.graph.regions.runs
    seconds = {operation: runs(operation) * time for operation, time in seconds.items()}
    units = scheduled(plan)
    comms = {o: _comms(plan, assignment, o) for unit in units for o in unit.operations}
    found = {o: tuple(one.repeated(trips(o), runs(o)) for one in sent) for o, sent in comms.items() if sent}
    return Account(seconds, found, units)


def launched(plan: AnyPlan, schedule: LaunchSchedule | None) -> AnyPlan:
    """A plan with another schedule of its launches."""
    changed = attrs.evolve(plan, schedule=schedule)
    return attrs.evolve(changed, comms=account(changed).all_comms)


def assignment_of(plan: PlanData) -> Assignment:
    """The assignment of a plan, as the cost model takes it."""
    states = {spec: _states(plan, spec) for spec in set(plan.specs.values())}
    markers = [operation for operation in plan.graph.operations if operation.op is RELABEL]
    return Assignment(
        mesh=plan.mesh,
        graph=plan.graph,
        logical=plan.logical,
        pinned={o: (plan.specs[o.operands[0]], plan.specs[o.tensors[0]]) for o in markers},
        states={value: states[spec] for value, spec in plan.specs.items()},
        strategies=plan.strategies,
        planned=plan.order,
        fused=fused_values(plan.graph) if plan.request.machine.fuses else frozenset(),
        copied=copied_views(plan.request.graph, plan.graph),
        latency_shares=latency_shares(plan.graph, plan.request.machine.bucket_bytes),
        reduce_dtype=plan.request.reduce_dtype,
    )


def _states(plan: PlanData, spec: DTensorSpec) -> dict[str, Placement]:
    placements = {axis: spec.placement(axis) for axis in plan.order}
    return {axis: state for axis, state in placements.items() if state != Replicate()}


def _cast_seconds(plan: PlanData, operation: Operation) -> float:
    """Seconds of the casts round the sums of a redistribution in `reduce_dtype`; it computes nothing else."""
    source, target = plan.specs[operation.operands[0]], plan.specs[operation.tensors[0]]
    machine, held, traffic = plan.request.machine, source.meta.dtype, 0.0
    steps = redistribution(source, target, plan.request.reduce_dtype)
    for spec, dtype in (*((step.source, step.sent_dtype) for step in steps), (target, source.meta.dtype)):
        if dtype != held:
            elements = spec.local_bytes() / source.meta.dtype.itemsize
            traffic += machine.traffic(elements * held.itemsize, elements * dtype.itemsize)
        held = dtype
    return machine.compute_seconds(0.0, traffic)


def _comms(plan: PlanData, assignment: Assignment, operation: Operation) -> tuple[Comm, ...]:
    sent = sends(assignment, plan.specs, operation)
    if not sent:
        return ()
    cause = plan.causes[operation] if operation.op is REDISTRIBUTE else cause_of(operation)
    seconds = send_seconds(plan.request.machine, assignment, operation, sent)
    return tuple(Comm(*one, time, cause.text, cause.source) for one, time in zip(sent, seconds, strict=True))


def send_seconds(machine: Machine, assignment: Assignment, operation: Operation, sent: Sequence[Sent]) -> list[float]:
    """The predicted time of each of an operation's collectives, as the search prices them."""
    share = assignment.latency_shares.get(operation.operands[0], 1.0) if operation.op is REDISTRIBUTE else 1.0
    return [bucketed_seconds(machine, assignment.mesh.axis_size(one[1]), one, share) for one in sent]


def sends(assignment: Assignment, specs: Mapping[Value, DTensorSpec], operation: Operation) -> tuple[Sent, ...]:
    """The collectives of an operation.

    Args:
        assignment: the program, with the strategies of its operations.
        specs: the spec of every value.
        operation: the operation.
    """
    if operation.op is not REDISTRIBUTE:
        return local_collectives(assignment, operation, assignment.strategies.get(operation, {}))
    steps = redistribution(specs[operation.operands[0]], specs[operation.tensors[0]], assignment.reduce_dtype)
    return tuple(step.sent for step in steps if step.is_collective)
