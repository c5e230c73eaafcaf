"""Launches of collectives in loops and branches: each is over where its trip or its side ends."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import spmd
from spmd import Machine, P
from spmd.inspect import Plan
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.ir.regions import stretches
from spmd.lowering.launches import Start, Wait, split_launches
from spmd.lowering.lower import lower
from spmd.plan.cost.account import launched

MESH = spmd.make_mesh({"data": 4}, runtime="abstract")
MACHINE = Machine(flops=1e10, memory_bandwidth=1e10, link_bandwidth=1e7, latency=1e-4, overlap=1.0)
SPECS = P(), P(None, "data"), P()
ROWS = 256


def body(carry: tuple[Tensor, Tensor], x: Tensor, w: Tensor) -> Any:
    """Two sums that pass beside the products which follow them."""
    y = spmd.constrain(torch.relu(x * carry[0] + carry[1]), P("data"))
    sums = y.sum(0), y.square().sum(0)
    for _ in range(4):
        y = torch.relu(y @ w)
    return sums, y.mean()


def scan(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda carry, x: body(carry, x, w), (h, h), xs)


def branch(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.cond(h.sum() > 0, lambda: body((h, h), xs[0], w), lambda: body((h + 1, h), xs[1], w))


def nested(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def outer(carry: Any, _: None) -> Any:
        total = spmd.constrain(torch.relu(xs[0] * carry[0]), P("data")).sum(0)
        carry, means = spmd.scan(lambda carry, x: body(carry, x, w), carry, xs)
        return (carry[0] + total, carry[1]), means.sum()

    return spmd.scan(outer, (h, h), None, length=3)


def gradients(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def loss(h: Tensor, w: Tensor) -> Tensor:
        (first, second), means = scan(h, xs, w)
        return (first * second).sum() + means.sum()

    return torch.func.grad(loss, (0, 1))(h, w)


def plan_of(function: Any, trips: int = 5, machine: Machine = MACHINE, specs: Any = SPECS) -> Plan:
    args = [torch.empty(shape, device="meta") for shape in ((64,), (trips, ROWS, 64), (64, 64))]
    return spmd.jit(function, specs, mesh=MESH, machine=machine).plan(*args)


@pytest.mark.parametrize("function", [scan, branch, nested, gradients])
def test_a_launch_is_waited_for_where_it_was_started(function: Any) -> None:
    """In the same trip or side, whose collectives it joins; in a window as large as any."""
    plan = plan_of(function)
    assert plan.comms
    for size in (0.0, 2.0**10, 2.0**40):
        schedule = attrs.evolve(plan.request.machine.launch_schedule, bucket_bytes=size, window_bytes=size)
        changed = launched(plan, schedule)
        operations = split_launches(lower(changed).graph(), schedule.window_bytes).operations
        counts = 0
        for stretch in stretches(operations):
            started = [operation.op.launch for operation in stretch if isinstance(operation.op, Start)]
            waited = [operation.op.launch for operation in stretch if isinstance(operation.op, Wait)]
            assert set(started) == set(waited) and len(started) == len(waited)
            counts += len(started)
        assert counts == len({comm.launch for comm in changed.comms})


def test_a_loop_computes_while_its_launches_are_under_way() -> None:
    plan = plan_of(scan)
    assert plan.schedule is not None
    ops = [operation.op for operation in split_launches(lower(plan).graph(), plan.schedule.window_bytes).operations]
    start, wait = (next(n for n, op in enumerate(ops) if isinstance(op, kind)) for kind in (Start, Wait))
    assert ops[start:wait].count(torch.ops.aten.mm.default) == 4
    assert plan.timing.exposed < 0.5 * plan.timing.communication
    assert plan.timing.step < launched(plan, None).timing.step


@pytest.mark.parametrize("function", [scan, nested])
def test_the_time_of_a_loop_is_that_of_its_trips(function: Any) -> None:
    steps = [plan_of(function, trips).timing.step for trips in (4, 8, 12)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0])
    assert steps[2] - steps[1] > 0.2 * steps[0]


def test_a_bucket_has_what_one_trip_sends() -> None:
    plan = plan_of(scan, trips=1000)
    for bucket_bytes, joined in ((512, 2), (511, 1)):
        found = launched(plan, LaunchSchedule(bucket_bytes, bucket_bytes))
        sums = [comm for comm in found.comms if comm.times == 1000]
        assert [(comm.kind, comm.joined, comm.bytes_of_a_run) for comm in sums] == [("all_reduce", joined, 384)] * 2


def test_what_only_a_trip_reads_is_not_sent_with_what_leaves_it() -> None:
    """Which would hold all of the bucket."""

    def step(carry: tuple[Tensor, Tensor], x: Tensor, w: Tensor) -> Any:
        (first, second), mean = body(carry, x, w)
        return (first, torch.sin(spmd.constrain(second, P()))), mean

    plan = plan_of(lambda h, xs, w: spmd.scan(lambda carry, x: step(carry, x, w), (h, h), xs))
    assert [(comm.kind, comm.joined) for comm in plan.comms if comm.times > 1] == [("all_reduce", 1)] * 2


def test_code_beside_a_loop_is_launched_as_without_it() -> None:
    weights = [torch.empty(256, 64, 64, device="meta")] * 2

    def gathers(w: Tensor, v: Tensor) -> Any:
        return (w * 2).sin(), (v * 2).cos()

    def beside(w: Tensor, v: Tensor) -> Any:
        return *gathers(w, v), spmd.fori_loop(0, 3, lambda i, x: torch.sin(x), torch.ones(3))

    jitted = [spmd.jit(f, P("data"), P(), mesh=MESH, machine=MACHINE) for f in (gathers, beside)]
    without, within = (one.plan(*weights) for one in jitted)
    assert [(c.kind, c.joined, c.launch) for c in without.comms] == [(c.kind, c.joined, c.launch) for c in within.comms]
    assert without.schedule == within.schedule
