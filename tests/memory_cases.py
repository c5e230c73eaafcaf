"""What plans of a distributed mesh say of memory."""

from __future__ import annotations

import attrs
import torch

import spmd
from spmd import P
from spmd.core.mesh import Mesh
from spmd.inspect import Plan
from spmd.lowering.launches import Start, Wait, split_launches
from spmd.lowering.lower import lower
from spmd.plan.memory.liveness import liveness_of
from spmd.plan.memory.peak import measure, memory_of
from spmd.testing.executed import ExecutedCollectives


def step(weights: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    def loss(weights: list[torch.Tensor]) -> torch.Tensor:
        h = x
        for weight in weights:
            h = torch.relu(h @ weight)
        return h.square().mean()

    return [weight - 0.1 * gradient for weight, gradient in zip(weights, torch.func.grad(loss)(weights), strict=True)]


def sharded(mesh: Mesh, memory_limit: int | None = None) -> spmd.api.jit.Jitted:
    return spmd.jit(step, (P("data"), P("data")), P("data"), mesh=mesh, memory_limit=memory_limit)


def arguments() -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 64, generator=generator) / 8 for _ in range(8)], torch.randn(8, 64, generator=generator)


def synchronous(plan: Plan) -> Plan:
    return attrs.evolve(plan, schedule=None)


def a_limit_makes_plans_synchronous(mesh: Mesh) -> None:
    """Between the memory of both schedules, collectives run alone and one after the other, and the values stay."""
    weights, x = arguments()
    free = sharded(mesh).plan(weights, x)
    least = memory_of(synchronous(free)).peak
    assert least < free.memory.peak
    step_within = sharded(mesh, memory_limit=(least + free.memory.peak) // 2)
    plan = step_within.plan(weights, x)
    assert plan.schedule is None and free.schedule is not None
    assert plan.memory.peak == least
    assert {comm.joined for comm in plan.comms} == {1}
    with ExecutedCollectives() as executed:
        results = step_within(weights, x)
    assert len(executed.found) == len(plan.comms)
    for result, wanted in zip(results, step(weights, x), strict=True):
        torch.testing.assert_close(result.full_tensor(), wanted, rtol=1e-5, atol=1e-6)


def buffers_count(mesh: Mesh) -> None:
    """A process holds what virtual ranks hold, and the buffers of its collectives."""
    weights, x = arguments()
    plan = sharded(mesh).plan(weights, x)
    shared = spmd.make_mesh(mesh.axes, runtime="virtual")
    lockstep = sharded(shared).plan(weights, x)
    assert plan.memory.peak > lockstep.memory.peak
    assert plan.schedule is not None
    operations = split_launches(lower(plan).graph(), plan.schedule.window_bytes).operations
    started = [operation.op.launch for operation in operations if isinstance(operation.op, Start)]
    waited = [operation.op.launch for operation in operations if isinstance(operation.op, Wait)]
    assert len(started) == len(set(started)) == len({comm.launch for comm in plan.comms})
    assert set(started) == set(waited)


def operands_are_held_until_their_call_returns(mesh: Mesh) -> None:
    """Where a collective is one call, its caller holds the operand while the result is unpacked."""
    gather = spmd.jit(lambda x: x, P(None, "data"), P(), mesh=mesh, donate_argnums=0)
    plan = gather.plan(torch.zeros(64, 64))
    whole, shard = 64 * 64 * 4, 64 * 64 * 4 // mesh.size
    assert memory_of(synchronous(plan)).peak == shard + 2 * whole
    assert plan.memory.peak == 2 * whole


def the_fullest_rank_counts(mesh: Mesh) -> None:
    """A rank with smaller shards that gathers parts of different sizes, which it copies, may hold the most."""
    fuller = 0
    for size in range(1, 12):
        for spec, out in ((P(("data", "model")), P("data")), (P(("model", "data")), P("model")), (P("data"), P())):
            plan = spmd.jit(lambda x: x * 2, spec, out, mesh=mesh).plan(torch.zeros(size, 64))
            peaks = {
                place: measure(liveness_of(plan, coordinate=place), frozenset(), plan.source).peak
                for place in mesh.coordinates()
            }
            assert plan.memory.peak == max(peaks.values()), (size, spec)
            fuller += plan.memory.peak > peaks[0, 0]
    assert fuller
