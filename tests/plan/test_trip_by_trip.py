"""Stacks that loops reshard item by item, beside the same programs with stacks that are resharded as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from workers import Workers, call_on_mesh

import spmd
from spmd import Machine, P
from spmd.inspect import Plan
from spmd.plan.search.trip_by_trip import trip_by_trip

MACHINE = Machine(flops=1e12, memory_bandwidth=1e12, link_bandwidth=1e9, latency=0.0)
"""One whose links take about as long for a layer's weights as a rank for its products with `MANY` rows."""
MANY = 6, 128, 8192
SPECS = P(None, "data"), P(None, "data"), P("data")


def layer(x: Tensor, weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    first, second = weights
    return torch.tanh(torch.tanh(x @ first) @ second), x.mean()


def forward(first: Tensor, second: Tensor, x: Tensor) -> Any:
    return spmd.scan(layer, x, (first, second))


def step(first: Tensor, second: Tensor, x: Tensor) -> Any:
    def loss(first: Tensor, second: Tensor) -> Tensor:
        x_, means = forward(first, second, x)
        return x_.square().sum() + means.sin().sum()

    grads, value = torch.func.grad_and_value(loss, (0, 1))(first, second)
    return first - grads[0], second - 0.5 * grads[1], value


def nested(first: Tensor, second: Tensor, x: Tensor) -> Any:
    def outer(x: Tensor, _: None) -> Any:
        first_, second_, _ = step(first, second, x)
        return forward(first_, second_, x)[0], None

    return spmd.scan(outer, x, None, length=2)[0]


def backwards(first: Tensor, second: Tensor, x: Tensor) -> Any:
    return spmd.scan(layer, x, (first, second), reverse=True)


def arguments(trips: int, width: int, rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (trips, width, width), (trips, width, width), (rows, width)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5 for shape in shapes)


SIZES = [(3, 8, 64), (1, 6, 61), (2, 3, 31), (0, 5, 8)]
RESULTS = {forward: (P("data"), P()), step: (*SPECS[:2], P()), nested: P("data"), backwards: (P("data"), P())}


def jitted(function: Any, mesh: spmd.Mesh, **options: Any) -> Any:
    return spmd.jit(function, SPECS, RESULTS[function], mesh=mesh, machine=MACHINE, **options)


def check(mesh: spmd.Mesh, function: Any, trips: int, width: int, rows: int, path: str | Path = "") -> None:
    """Run the plan that reshards item by item, also from a file."""
    args = arguments(trips, width, rows)
    whole = jitted(function, mesh).plan(*args)
    moved = trip_by_trip(whole)
    assert moved is not None or function is nested or width < 8
    plan = Plan.of((moved or whole).verify())
    sources: list[Any] = [plan]
    if path:
        plan.save(path)
        sources.append(path)
    for source in sources:
        run = jitted(function, mesh, plan=source)
        assert [(comm.kind, comm.bytes) for comm in run.plan(*args).comms] == [(c.kind, c.bytes) for c in plan.comms]
        torch.testing.assert_close(tree_map(lambda each: each.full_tensor(), run(*args)), function(*args))


@pytest.mark.parametrize("function", RESULTS)
@pytest.mark.parametrize(("trips", "width", "rows"), SIZES)
def test_items_are_resharded_as_stacks_are(function: Any, trips: int, width: int, rows: int, tmp_path: Path) -> None:
    """Also at uneven and empty shards, without trips, and from a file."""
    check(spmd.make_mesh({"data": 4}, runtime="virtual"), function, trips, width, rows, tmp_path / "plan.json")


def check_all(mesh: spmd.Mesh) -> None:
    check(mesh, step, *SIZES[0])
    check(mesh, backwards, *SIZES[2])


def test_processes(workers: Workers) -> None:
    workers.run(call_on_mesh, check_all, {"data": 4}, "distributed", ranks=4)


def test_the_faster_plan_is_taken() -> None:
    """Its launches pass beside the trips; what two loops read is gathered once."""
    mesh, args = spmd.make_mesh({"data": 4}, runtime="abstract"), arguments(*MANY)
    plan = jitted(step, mesh).plan(*args)
    weights = [comm for comm in plan.comms if comm.bytes_of_a_run > 1000]
    assert sorted((comm.kind, comm.times) for comm in weights) == [("all_gather", 6)] * 2 + [("reduce_scatter", 6)] * 2
    assert {comm.bytes for comm in weights} == {0.75 * args[0].nbytes}
    assert plan.timing.exposed < 0.4 * plan.timing.communication


def test_a_sum_of_items_is_one_collective() -> None:
    """Where the search scatters items and gathers the stack, as fewer bytes are stacked."""
    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    gradients = torch.func.grad(lambda *args: forward(*args)[0].square().sum(), (0, 1))
    plan = spmd.jit(gradients, (P(), P(), P("data")), P(), mesh=mesh, machine=MACHINE).plan(*arguments(*MANY))
    moved = trip_by_trip(plan)
    assert moved is None or {comm.kind for comm in plan.comms} == {"reduce_scatter", "all_gather"}
    assert {(comm.kind, comm.times) for comm in (moved or plan).comms} == {("all_reduce", 6)}


def test_a_stack_that_is_read_as_a_whole_stays_whole() -> None:
    def function(first: Tensor, second: Tensor, x: Tensor) -> Any:
        whole = spmd.constrain(first + second, P())
        return spmd.scan(lambda x, w: (torch.tanh(x @ w), None), x, whole)[0] + whole.sum()

    mesh = spmd.make_mesh({"data": 4}, runtime="abstract")
    plan = spmd.jit(function, SPECS, P("data"), mesh=mesh, machine=MACHINE).plan(*arguments(*MANY))
    assert trip_by_trip(plan) is None


@pytest.mark.parametrize("first", [P(None, "model"), P(None, None, ("pipe", "model"))])
def test_items_that_are_redistributed_as_they_come_and_as_they_are_stacked(first: P) -> None:
    def function(x: Tensor) -> Tensor:
        def body(item: Tensor) -> Tensor:
            torch.randn(4)  # between the item and what reads it
            return item

        return spmd.constrain(spmd.map(body, spmd.constrain(x, P(None, None, "model"))), P(None, None, "pipe")) * 2

    mesh = spmd.make_mesh({"model": 2, "pipe": 2}, runtime="virtual")
    jitted, x = spmd.jit(function, first, mesh=mesh), torch.randn(3, 4, 4, dtype=torch.float64)
    moved = trip_by_trip(jitted.plan(x))
    assert moved is not None
    moved.verify()
    torch.testing.assert_close(jitted(x).full_tensor(), x * 2)
