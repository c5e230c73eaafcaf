"""The choice of the sizes of buckets and of the window."""

import attrs
import torch
from memory_cases import step as step_of_layers

import spmd
from spmd import Machine, P
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.plan.cost.account import account, launched
from spmd.plan.schedule.choice import best_schedule

MACHINE = Machine(flops=2e10, memory_bandwidth=1e10, link_bandwidth=5e7, latency=1e-5)


def data_parallel(machine: Machine, runtime: str = "abstract") -> spmd.inspect.Plan:
    """64 layers, whose gradients are summed while earlier layers are differentiated."""
    mesh = spmd.make_mesh({"data": 4}, runtime=runtime)
    step = spmd.jit(step_of_layers, (P(), P("data")), P(), mesh=mesh, machine=machine)
    return step.plan([torch.empty(128, 128, device="meta")] * 64, torch.empty(4096, 128, device="meta"))


def with_largest_buckets(plan: spmd.inspect.Plan) -> spmd.inspect.Plan:
    return launched(plan, account(plan), plan.request.machine.launch_schedule)


def test_buckets_are_smaller_where_communication_can_pass_beside_computation():
    plan = data_parallel(MACHINE)
    assert plan.schedule is not None and plan.schedule.bucket_bytes < MACHINE.bucket_bytes
    assert plan.timing.step < with_largest_buckets(plan).timing.step


def test_buckets_are_the_largest_where_launches_take_longer_than_computation():
    machine = attrs.evolve(MACHINE, flops=1e14, memory_bandwidth=1e14, latency=1e-2)
    assert data_parallel(machine).schedule == machine.launch_schedule


def test_virtual_ranks_have_the_largest_buckets():
    assert data_parallel(MACHINE, "virtual").schedule == MACHINE.launch_schedule


def test_the_schedule_has_the_least_step_of_all_that_are_tried():
    plan = data_parallel(MACHINE)
    found = account(plan)
    for parts in (1, 2, 4, 8, 16):
        size = MACHINE.bucket_bytes / parts
        other = launched(plan, found, LaunchSchedule(size, size))
        assert plan.timing.step <= other.timing.step
        assert best_schedule(other).schedule == plan.schedule
