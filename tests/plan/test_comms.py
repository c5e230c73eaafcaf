"""`plan.comms` against the collectives that ran: one by one, in order, with the bytes of the rank that sends most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from sampling import product
from torch import Tensor

import spmd
from spmd import P
from spmd.api.jit import Jitted
from spmd.collectives.traffic import record_traffic
from spmd.testing.traffic import comms_differences


def differences(step: Jitted, *args: Any) -> list[str]:
    """Where a plan differs from what ran; the lowered program is as the plan in any case."""
    plan = step.plan(*args)
    listed = [(comm.kind, comm.axes, comm.bytes) for comm in step.lower(*args).collectives]
    assert [(comm.kind, comm.axes, comm.bytes) for comm in plan.comms] == listed
    with record_traffic() as traffic:
        step(*args)
    return comms_differences(plan, traffic)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x @ up) @ down, -1)


def gradients(x: Tensor, up: Tensor, down: Tensor) -> Any:
    return torch.func.grad(lambda *weights: mlp(x, *weights).square().mean(), argnums=(0, 1))(up, down)


def attention(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    heads = (x @ up).unflatten(-1, (2, -1)).transpose(0, 1)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(0, 1).flatten(1) @ up.T


def normalized(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.layer_norm(x @ up, (up.shape[1],)).logsumexp(-1).cumsum(0)


def convolved(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.conv1d(x[None], up[:, :, None].expand(-1, -1, 3)[:, : x.shape[0]].contiguous(), padding=1)[0]


LAYOUTS = {
    "data": (P("x"), P(), P()),
    "tensor": (P(), P(None, "x"), P("x")),
    "both": (P("y"), P(None, "x"), P("x")),
    "nested": (P(("x", "y")), P(("y", "x")), P(None, ("x", "y"))),
    "partial": (P(partial={"x": "sum"}), P(partial={"y": "sum"}), P("y", "x")),
}
MESHES = ({"x": 3, "y": 2}, {"x": 2, "y": 4})


@pytest.mark.parametrize(
    ("function", "layout", "axes"), product([mlp, gradients, attention, normalized, convolved], LAYOUTS, MESHES)
)
def test_what_is_planned_runs(function: Callable[..., Any], layout: str, axes: dict[str, int]) -> None:
    mesh = spmd.make_mesh(axes, runtime="virtual")
    machine = spmd.Machine(flops=1e9, memory_bandwidth=1e8, latency=0.0)
    for rows, width in ((5, 6), (1, 10)):
        args = (normal(rows, width), normal(width, 2 * width), normal(2 * width, width))
        placed = [spmd.distribute(arg, spec, mesh) for arg, spec in zip(args, LAYOUTS[layout], strict=True)]
        step = spmd.jit(function, LAYOUTS[layout], P("y"), mesh=mesh, machine=machine)
        assert [] == differences(step, *placed)


@pytest.mark.parametrize("rows", [8, 7, 2])
@pytest.mark.parametrize(
    ("partial", "kinds"), [(("x",), ["reduce_scatter"]), (("x", "y"), ["reduce_scatter", "all_reduce"])]
)
def test_a_reduction_of_which_ranks_read_their_shards_is_scattered(
    rows: int, partial: tuple[str, ...], kinds: list[str]
) -> None:
    mesh = spmd.make_mesh({"x": 4, "y": 2}, runtime="virtual")
    step = spmd.jit(
        lambda x: spmd.reshard(spmd.reshard(x, P()), P("x")).sin(),
        P(partial=dict.fromkeys(partial, "sum")),
        P("x"),
        mesh=mesh,
    )
    x = spmd.distribute(normal(rows, 3), P(), mesh).redistribute(P(partial=dict.fromkeys(partial, "sum")))
    assert kinds == [comm.kind for comm in step.plan(x).comms]
    assert [] == differences(step, x)
    torch.testing.assert_close(normal(rows, 3).sin(), step(x).full_tensor())


@pytest.mark.parametrize("rows", [8, 7])
def test_two_axes_are_reduced_together(rows: int) -> None:
    mesh = spmd.make_mesh({"x": 4, "y": 2}, runtime="virtual")
    step = spmd.jit(lambda x: x.sum(), P("x", "y"), P(), mesh=mesh)
    x = spmd.distribute(normal(rows, 3), P("x", "y"), mesh)
    assert [("all_reduce", ("x", "y"))] == [(comm.kind, comm.axes) for comm in step.plan(x).comms]
    assert [] == differences(step, x)
    torch.testing.assert_close(normal(rows, 3).sum(), step(x).full_tensor())
    kept = spmd.jit(lambda x: spmd.constrain(x.sum(), P(partial={"x": "sum"})), P("x", "y"), P(), mesh=mesh)
    assert [("y",), ("x",)] == [comm.axes for comm in kept.plan(x).comms]  # a constraint says what lies between


def test_a_reduction_that_others_read_stays() -> None:
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = spmd.reshard(x, P())
        return whole, spmd.reshard(whole, P("x")).sin()

    x = spmd.distribute(normal(8), P(), mesh).redistribute(P(partial={"x": "sum"}))
    step = spmd.jit(both, P(partial={"x": "sum"}), (P(), P("x")), mesh=mesh)
    assert ["all_reduce"] == [comm.kind for comm in step.plan(x).comms]
    assert [] == differences(step, x)


def test_differences_are_said() -> None:
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    step, x = spmd.jit(torch.sin, P("x"), P(), mesh=mesh), torch.ones(5)
    plan = step.plan(x)
    with record_traffic() as traffic:
        step(x)
    (comm,) = plan.comms
    wrong = attrs.evolve(plan, comms=(attrs.evolve(comm, bytes=15.0), comm))
    assert [
        "collective 0: planned all_gather over x, 15.0 bytes; ran all_gather over x, 20.0 bytes",
        "collective 1: planned all_gather over x, 20.0 bytes; ran nothing",
    ] == comms_differences(wrong, traffic)
