"""Plans as files: the same plan again without a search, and refusals of plans for something else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import sample

import comms
import gpt
import layouts
import spmd
import training
from spmd import P
from spmd.inspect import Plan

WEIGHTS = {"up": P(None, "model"), "down": P("model")}


def make_step(activation: Any) -> Any:
    def step(weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return F.cross_entropy(activation(x @ weights["up"]) @ weights["down"], x.argmax(-1))

        grads, value = torch.func.grad_and_value(loss)(weights)
        return {name: weights[name] - grads[name] for name in weights}, value

    return step


step = make_step(torch.relu)


def arguments(width: int = 12) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(6, width, generator=generator), torch.randn(width, 6, generator=generator)
    return {"up": up, "down": down}, torch.randn(8, 6, generator=generator)


def jitted(function: Any = step, runtime: str = "virtual", batch: P = P("data"), **options: Any) -> Any:  # noqa: B008
    axes = options.pop("axes", {"data": 2, "model": 3})
    mesh = spmd.make_mesh(axes, runtime=runtime)  # type: ignore[arg-type]
    return spmd.jit(function, (WEIGHTS, batch), (WEIGHTS, P()), mesh=mesh, **options)


def refuse_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: Any) -> Plan:
        raise AssertionError("a loaded plan was searched for")

    monkeypatch.setattr("spmd.api.programs.stages.plan", refuse)
    monkeypatch.setattr("spmd.plan.search.problem.AxisProblem.solve", refuse)


def test_a_loaded_plan_is_the_same_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = jitted()
    plan = first.plan(*arguments())
    plan.save(tmp_path / "plan.json")
    refuse_search(monkeypatch)
    again = jitted(plan=tmp_path / "plan.json")
    loaded = again.plan(*arguments())
    assert loaded.comms
    assert plan.comms == loaded.comms
    assert (plan.seconds, plan.exact, str(plan)) == (loaded.seconds, loaded.exact, str(loaded))
    assert first.lower(*arguments()).as_text() == again.lower(*arguments()).as_text()
    (expected, expected_loss), (actual, loss) = step(*arguments()), again(*arguments())
    torch.testing.assert_close(loss.full_tensor(), expected_loss)
    torch.testing.assert_close(actual["up"].full_tensor(), expected["up"])
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "plan.json").read_bytes() == (tmp_path / "again.json").read_bytes()


@pytest.mark.parametrize("name", sample(layouts.STRATEGIES, ["dp", "fsdp_tp"]))
def test_every_strategy_of_the_example_survives_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpt.Config(vocab=64, width=32, heads=8, layers=1, context=16)
    strategy = layouts.STRATEGIES[name]
    example = training.Training(config, strategy, spmd.make_mesh(strategy.mesh, runtime="virtual"))
    state, batch = example.init(), comms.workload_batch(config, 8)
    plan = example.step().plan(state, batch)
    plan.save(tmp_path / "plan.json")
    refuse_search(monkeypatch)
    loaded = example.step(plan=tmp_path / "plan.json").plan(state, batch)
    assert plan.comms == loaded.comms
    assert str(plan) == str(loaded)


def test_a_plan_of_an_abstract_mesh_runs_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = jitted(runtime="abstract").plan(*arguments())
    refuse_search(monkeypatch)
    _, loss = jitted(plan=plan)(*arguments())
    torch.testing.assert_close(loss.full_tensor(), step(*arguments())[1])


def test_constraints_and_gathered_edges_survive_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return spmd.constrain((x + 1).reshape(24), P(("b", "a"))).reshape(4, 6) * 2

    mesh = spmd.make_mesh({"a": 3, "b": 2}, runtime="virtual")
    x = torch.arange(24.0).reshape(4, 6)
    spmd.jit(f, P("b"), P(None, "a"), mesh=mesh).plan(x).save(tmp_path / "plan.json")
    refuse_search(monkeypatch)
    again = spmd.jit(f, P("b"), P(None, "a"), mesh=mesh, plan=tmp_path / "plan.json")
    assert torch.equal((x + 1) * 2, again(x).full_tensor())


@pytest.mark.parametrize(
    ("other", "width", "reason"),
    [
        (
            {"axes": {"data": 3, "model": 2}},
            12,
            r"the mesh has axes \{'data': 3, 'model': 2\} here and \{'data': 2, 'model': 3\} in the plan",
        ),
        ({"batch": P()}, 12, r"input x is f32\[8,6\] P\(\) here and f32\[8,6\] P\('data'\) in the plan"),
        ({}, 18, r"line 0 of the program is the first that differs:\n.*f32\[18,6\]\n.*f32\[12,6\]"),
        (
            {"function": make_step(torch.tanh)},
            12,
            r"is the first that differs, at test_saved_plans.py:\d+:\n.*aten\.tanh.*\n.*aten\.relu",
        ),
    ],
)
def test_a_plan_for_something_else_is_refused_with_the_reason(
    other: dict[str, Any], width: int, reason: str, tmp_path: Path
) -> None:
    jitted().plan(*arguments()).save(tmp_path / "plan.json")
    with pytest.raises(spmd.PlanError, match=f"The saved plan is for something else: .*{reason}"):
        jitted(**other, plan=tmp_path / "plan.json").plan(*arguments(width))


def test_results_with_other_specs_are_refused(tmp_path: Path) -> None:
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    spmd.jit(torch.sin, P("data"), P("data"), mesh=mesh).plan(torch.ones(4)).save(tmp_path / "plan.json")
    with pytest.raises(spmd.PlanError, match=r"result 0 is f32\[4\] P\(\) here and f32\[4\] P\('data'\) in the plan"):
        spmd.jit(torch.sin, P("data"), P(), mesh=mesh, plan=tmp_path / "plan.json").plan(torch.ones(4))


def test_files_that_are_no_plans_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(spmd.PlanError, match=r"plan\.json cannot be read: No such file"):
        jitted(plan=path).plan(*arguments())
    path.write_text("what?")
    with pytest.raises(spmd.PlanError, match="is not a saved plan: Expecting value"):
        jitted(plan=path).plan(*arguments())
    path.write_text("[]")
    with pytest.raises(spmd.PlanError, match="has format None, expected 10"):
        jitted(plan=path).plan(*arguments())
    jitted().plan(*arguments()).save(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({key: item for key, item in document.items() if key != "values"}))
    with pytest.raises(spmd.PlanError, match=r"plan\.json is damaged: the document must have 'values'"):
        jitted(plan=path).plan(*arguments())
    with pytest.raises(spmd.PlanError, match=r"plan must be a path or a spmd.inspect.Plan \(got 3\)"):
        jitted(plan=3)


def test_a_strategy_that_a_rule_does_not_give_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    jitted().plan(*arguments()).save(path)
    path.write_text(path.read_text().replace('"label": "i"', '"label": "z"'))
    with pytest.raises(spmd.PlanError, match=r"runs aten\..* at test_saved_plans.py:.* with strategy 'z'"):
        jitted(plan=path).plan(*arguments())


def test_a_plan_that_was_changed_by_hand_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    jitted().plan(*arguments()).save(path)
    document = json.loads(path.read_text())
    document["values"]["relu"].update(dims=[[], []], partial={}, spec="P()")
    path.write_text(json.dumps(document))
    with pytest.raises(spmd.PlanError, match=r"%relu: f32\[8,12\] has"):
        jitted(plan=path).plan(*arguments())


SAVE = """
import sys, torch, spmd
from spmd import P, TensorMeta
mesh = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
f = spmd.jit(lambda x, w: torch.softmax(x @ w, -1), (P("x"), P("y", "x")), P("x", "y"), mesh=mesh)
f.plan(torch.ones(4, 6), torch.ones(6, 8)).save(sys.argv[1])
"""


def test_the_bytes_of_a_file_do_not_depend_on_hash_seeds(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        subprocess.run(
            [sys.executable, "-c", SAVE, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            check=True,
        )
    text = (tmp_path / "0").read_text()
    assert text == (tmp_path / "1").read_text()
    assert "aten.mm.default" in text


def test_plans_under_a_memory_limit_survive_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(weights: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        def loss(weights: list[torch.Tensor]) -> torch.Tensor:
            h = x
            for weight in weights:
                h = h + torch.relu(h @ weight)
            return h.square().sum()

        return [w - g for w, g in zip(weights, torch.func.grad(loss)(weights), strict=True)]

    mesh = spmd.make_mesh({"data": 4}, runtime="virtual")
    weights, x = [torch.randn(64, 64) for _ in range(6)], torch.randn(128, 64)

    def sharded(**options: Any) -> Any:
        return spmd.jit(deep, (P("data"), P("data")), P("data"), mesh=mesh, **options)

    free = sharded().plan(weights, x)
    limit = free.memory.peak * 4 // 5
    plan = sharded(memory_limit=limit).plan(weights, x)
    assert len(plan.comms) > len(free.comms)  # what was gathered is gathered again
    plan.save(tmp_path / "plan.json")
    free.save(tmp_path / "free.json")
    refuse_search(monkeypatch)
    again = sharded(plan=tmp_path / "plan.json", memory_limit=limit)
    assert (str(plan), plan.comms, plan.memory.peak) == (
        str(again.plan(weights, x)),
        again.plan(weights, x).comms,
        again.plan(weights, x).memory.peak,
    )
    torch.testing.assert_close(again(weights, x)[0].full_tensor(), deep(weights, x)[0], rtol=1e-4, atol=1e-4)
    with pytest.raises(spmd.PlanError, match=rf"The given plan holds {free.memory.peak:,} bytes per rank .* {limit:,}"):
        sharded(plan=tmp_path / "free.json", memory_limit=limit).plan(weights, x)


def test_a_plan_that_may_gather_what_is_to_be_kept_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    jitted().plan(*arguments()).save(path)
    with pytest.raises(spmd.PlanError, match=r"has weights_up along \['model'\] here and \[\] in the plan"):
        jitted(plan=path, keep_sharded={"0['up']": "model"}).plan(*arguments())
    kept = jitted(keep_sharded={"0['up']": "model"}).plan(*arguments())
    kept.save(path)
    assert kept.comms == jitted(plan=path, keep_sharded={"0['up']": "model"}).plan(*arguments()).comms
