"""Results without a given spec: the planner chooses one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.core.spec import TensorMeta

MESH = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")
ONE_AXIS = spmd.make_mesh({"x": 4}, runtime="abstract")


def layer(x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    y = torch.relu(x @ w)
    return {"y": y, "flat": y.reshape(-1, y.shape[-1]), "loss": y.square().mean(), "x": x, "turned": y.transpose(0, 1)}


@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize(
    "specs",
    [
        (P(), P()),
        (P("data"), P(None, "model")),
        (P(("model", "data")), P("data")),
        (P(None, "data"), P(partial={"model": "sum"})),
        (P(None, None, "model"), P(("data", "model"))),
    ],
    ids=repr,
)
def test_values_are_those_of_one_device(specs: Any, rows: int) -> None:
    x, w = torch.randn(rows, 6, 4), torch.randn(4, 9)
    args = spmd.distribute((x, w), specs, MESH)
    results, expected = spmd.jit(layer, specs, mesh=MESH)(*args), layer(x, w)
    for name, result in results.items():
        assert not result.spec.partial
        torch.testing.assert_close(result.full_tensor(), expected[name])


def fsdp_gradient(w: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.func.grad_and_value(lambda w: torch.tanh(x @ w).square().mean())(w)


def test_a_gradient_is_laid_out_as_it_is_cheapest() -> None:
    """Reduced and scattered, not gathered; the loss has no dim that could be sharded."""
    metas = TensorMeta((1024, 1024), torch.float32), TensorMeta((4096, 1024), torch.float32)
    step = spmd.jit(fsdp_gradient, (P("x"), P("x")), mesh=ONE_AXIS)
    assert {comm.kind for comm in step.plan(*metas).comms} == {"all_gather", "reduce_scatter", "all_reduce"}
    gradient, loss = step.lower(*metas).output_specs
    assert loss.pspec == P() and not gradient.is_replicated


def test_no_given_spec_makes_a_faster_plan() -> None:
    """The search along one axis is exact, so a free result costs no more than with any spec that it may have."""
    metas = TensorMeta((64, 48), torch.float32), TensorMeta((48, 96), torch.float32)
    product = lambda x, w: torch.relu(x @ w)  # noqa: E731
    for ins in itertools.product((P(), P("x"), P(None, "x"), P(partial={"x": "sum"})), repeat=2):
        free = spmd.jit(product, ins, mesh=ONE_AXIS).plan(*metas)
        given = [spmd.jit(product, ins, out, mesh=ONE_AXIS).plan(*metas) for out in (P(), P("x"), P(None, "x"))]
        assert free.seconds == pytest.approx(min(plan.seconds for plan in given), rel=1e-9)


def test_none_inside_the_tree_leaves_a_part_free() -> None:
    x, w = torch.randn(4, 6, 4), torch.randn(4, 9)
    specs = {"y": P("model"), "flat": None, "loss": P(), "x": None, "turned": P(None, "data")}
    results = spmd.jit(layer, (P("data"), P()), specs, mesh=MESH)(x, w)
    assert [P("model"), P(None, "data")] == [results[name].spec.pspec for name in ("y", "turned")]
    nothing = spmd.jit(lambda x: (x + 1, None), P("data"), (P("data"), None), mesh=MESH)(x)
    assert nothing[1] is None


def test_a_dim_that_no_spec_describes_is_not_sharded() -> None:
    """The inner part of a flattened dim may be sharded inside the program, but not in its result."""
    x = torch.randn(4, 6, 3)
    flatten = lambda x: x.reshape(24, 3)  # noqa: E731
    inner, outer = (spmd.jit(flatten, spec, mesh=MESH) for spec in (P(None, "model"), P("data")))
    for step in (inner, outer):
        torch.testing.assert_close(step(x).full_tensor(), x.reshape(24, 3))
    assert [comm.kind for comm in inner.plan(x).comms] == ["all_to_all"]
    assert not outer.plan(x).comms and outer(x).spec.pspec == P("data")


def test_a_call_inside_another_program_is_free_too() -> None:
    x, w = torch.randn(4, 6, 4), torch.randn(4, 9)
    inner = spmd.jit(layer, (P("data"), P()), mesh=MESH)
    outer = spmd.jit(lambda x, w: inner(x, w)["y"] + 1, (P("data"), P()), mesh=MESH)
    torch.testing.assert_close(outer(x, w).full_tensor(), layer(x, w)["y"] + 1)
    assert 0 == sum(comm.bytes for comm in outer.plan(x, w).comms)


def test_saved_plans_hold_the_choice(tmp_path: Path) -> None:
    x, w = torch.randn(4, 6, 4), torch.randn(4, 9)
    specs, path = (P("data"), P(None, "model")), tmp_path / "plan.json"
    step = spmd.jit(layer, specs, mesh=MESH)
    step.plan(x, w).save(path)
    loaded = spmd.jit(layer, specs, mesh=MESH, plan=path)
    assert step.lower(x, w).as_text() == loaded.lower(x, w).as_text()
    given = dict.fromkeys(layer(x, w)) | {"flat": P("data")}
    with pytest.raises(spmd.PlanError, match=r"result 0 is f32\[24,9\] P\('data'\) here and None in the plan"):
        spmd.jit(layer, specs, given, mesh=MESH, plan=path).plan(x, w)


def test_explanations_name_the_result() -> None:
    plan = spmd.jit(layer, (P("data"), P(None, "model")), mesh=MESH).plan(torch.ones(4, 6, 4), torch.ones(4, 9))
    assert "result 4 requires P('data', None, 'model')" in str(plan.explain("relu"))
