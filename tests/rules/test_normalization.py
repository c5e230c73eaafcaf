"""Norms over sharded dims: ranks sum statistics, and the data stay where they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from optree import tree_leaves

import spmd
from spmd import P

CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], P]] = {
    "batch_norm over the batch": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        (61, 4, 64, 64),
        (4,),
        P("x"),
    ),
    "batch_norm over space": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        (3, 4, 509, 64),
        (4,),
        P(None, None, "x"),
    ),
    "layer_norm over its dim": (
        lambda x, w, b: F.layer_norm(x, (16381,), w, b),
        (31, 16381),
        (16381,),
        P(None, "x"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_only_statistics_are_communicated(name: str) -> None:
    operator, shape, parameters, spec = CASES[name]
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    arguments = [draw(shape), draw(parameters), draw(parameters)]

    def f(*arguments: torch.Tensor) -> Any:
        result, pull = torch.func.vjp(operator, *arguments)
        return result, *pull(result.sin())

    parameter = P("x") if parameters == shape[1:] else P()
    specs = (spec, parameter, parameter)
    sharded = spmd.jit(f, specs, (spec, *specs), mesh=spmd.make_mesh({"x": 4}, runtime="virtual"))
    comms = sharded.plan(*arguments).comms
    assert {"all_reduce"} == {comm.kind for comm in comms}
    assert max(comm.bytes for comm in comms) <= 2 * 2 * 8 * max(shape[0], parameters[0] if parameter == P() else 0)
    for wanted, given in zip(tree_leaves(f(*arguments)), tree_leaves(sharded(*arguments)), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)], ids=str)
def test_gradients_of_gradients_that_nobody_reads(wanted: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3, 5), (3,), (3,)))
    slope = torch.func.grad(lambda *given: CASES["batch_norm over space"][0](*given).sin().sum(), argnums=(0, 1, 2))
    f = torch.func.grad(lambda *given: sum(part.square().sum() for part in slope(*given)[1:]), argnums=wanted)
    mesh = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
    machine = spmd.Machine(flops=1e6, latency=0.0)
    sharded = spmd.jit(f, (P("x", None, "y"), P(), P()), P(), mesh=mesh, machine=machine)
    for wanted_value, given in zip(f(x, w, b), sharded(x, w, b), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted_value)


def test_group_norm_over_batch_and_space_or_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 8, 61, 64), (8,), (8,)))
    mesh = spmd.make_mesh({"x": 2, "y": 3}, runtime="virtual")

    def f(*arguments: torch.Tensor) -> torch.Tensor:
        x, w, b = arguments
        return F.group_norm(x, 4, w, b)

    for image, parameter, kinds in (
        (P("x", None, "y"), P(), {"all_reduce"}),
        (P("x"), P(), set()),
        (P(None, "x"), P("x"), set()),
        (P("y", "x"), P("x"), set()),
    ):
        sharded = spmd.jit(f, (image, parameter, parameter), image, mesh=mesh)
        assert kinds == {comm.kind for comm in sharded.plan(x, w, b).comms}
        torch.testing.assert_close(sharded(x, w, b).full_tensor(), f(x, w, b))
