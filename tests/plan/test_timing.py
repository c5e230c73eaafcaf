"""The predicted time of a step as a schedule of streams."""

import attrs
import pytest
import torch

import spmd
from spmd import Machine, P
from spmd.inspect import Plan
from spmd.ir.regions import STACK
from spmd.plan.cost.account import account

MACHINE = Machine(flops=1e9, memory_bandwidth=1e9, link_bandwidth=1e7, latency=1e-4)


def two_gathers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The second product can be computed while the other factor of the third is gathered."""
    h = x @ x
    h = spmd.reshard(h, P("data"))
    whole = spmd.reshard(y, P())
    for _ in range(4):
        h = torch.relu(h) @ x
    return h @ whole


def plan_of(machine: Machine) -> Plan:
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    step = spmd.jit(two_gathers, (P(), P("data")), P("data"), mesh=mesh, machine=machine)
    matrix = torch.empty(64, 64, device="meta")
    return step.plan(matrix, matrix)


def test_what_overlaps_is_not_exposed():
    timing = plan_of(MACHINE).timing
    assert timing.step == pytest.approx(timing.compute + timing.exposed)
    assert 0 <= timing.exposed < timing.communication
    assert timing.communication == pytest.approx(1e-4 + 3 / 4 * 64 * 64 * 4 / 1e7)


def test_ranks_that_compute_nothing_while_they_communicate_expose_all():
    timing = plan_of(attrs.evolve(MACHINE, overlap=0.0)).timing
    assert timing.exposed == pytest.approx(timing.communication)


def test_an_all_reduce_that_is_launched_alone_copies_its_operand():
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    machine = attrs.evolve(MACHINE, overlap=0.0)
    step = spmd.jit(lambda x: x.sum(0), P("data"), P(), mesh=mesh, machine=machine)
    plan = step.plan(torch.empty(64, 64, device="meta"))
    (comm,) = plan.comms
    nbytes = 64 * 4
    assert comm.kind == "all_reduce"
    assert plan.timing.communication == pytest.approx(1e-4 + 2 * 3 / 4 * nbytes / 1e7 + 2 * nbytes / 1e9)


def test_synchronous_plans_expose_all():
    timing = attrs.evolve(plan_of(MACHINE), schedule=None).timing
    assert timing.exposed == pytest.approx(timing.communication)


def test_a_program_that_sends_nothing_only_computes():
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    plan = spmd.jit(torch.relu, P("data"), P("data"), mesh=mesh).plan(torch.empty(8, device="meta"))
    assert (plan.timing.communication, plan.timing.exposed) == (0, 0)
    assert plan.timing.step == plan.timing.compute == pytest.approx(plan.seconds)


def test_a_launch_waits_for_the_one_before_it_along_its_axis():
    plan = plan_of(MACHINE)
    slow = plan_of(attrs.evolve(MACHINE, link_bandwidth=1e5)).timing
    assert slow.exposed > plan.timing.exposed
    assert slow.step >= slow.communication


def seconds_of_stacks(function, trips: int) -> list[float]:
    mesh, x = spmd.make_mesh({"data": 4}, runtime="abstract"), torch.empty(256, 64, device="meta")
    plan = spmd.jit(function, P("data"), P(), mesh=mesh, machine=MACHINE).plan(x, trips)
    return [time for one, time in account(plan).seconds.items() if one.op is STACK]


def test_each_trip_writes_its_part_of_a_stack():
    def kept(x: torch.Tensor, trips: int) -> torch.Tensor:
        return spmd.scan(lambda c, _: (torch.tanh(c), c), x, None, length=trips)[1]

    two, four = (seconds_of_stacks(kept, trips) for trips in (2, 4))
    assert len(two) == 1 and four == pytest.approx([2 * two[0]])


def test_a_stack_that_stays_a_list_costs_nothing():
    """As what a gradient keeps, which only a loop reads."""

    def last(x: torch.Tensor, trips: int) -> torch.Tensor:
        return spmd.scan(lambda c, _: (torch.tanh(c), None), x, None, length=trips)[0].sum()

    assert seconds_of_stacks(torch.func.grad(last), 2) == [0.0]
