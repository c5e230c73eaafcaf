"""Explanations: figures against those of the search, and what stands in them."""

import pytest
import torch
from gpt_step import SHAPES, TENSOR_PARALLEL, gpt_step

import spmd
from spmd import P
from spmd.inspect import Plan
from spmd.inspect.questions.explain import Explainer


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def layer_plan() -> Plan:
    mesh = spmd.make_mesh({"data": 2, "model": 4}, runtime="abstract")
    step = spmd.jit(layer, (P("data", "model"), P("model")), P("data"), mesh=mesh)
    return step.plan(torch.empty(6, 8), torch.empty(8, 4))


def gpt_plan(specs: object, tokens: P) -> Plan:
    params = {name: spmd.TensorMeta((a * 8, b * 8), torch.float32) for name, (a, b) in SHAPES.items()}
    mesh = spmd.make_mesh({"x": 4}, runtime="abstract")
    return spmd.jit(gpt_step, (specs, tokens), specs, mesh=mesh).plan(params, spmd.TensorMeta((8, 16), torch.int64))


def test_an_explanation_has_alternatives_neighbours_and_pins() -> None:
    found = layer_plan().explain("mm", exact=True)
    model = found["model"]
    assert ("data", "model") == tuple(axis.axis for axis in found.axes)
    assert model.chosen is not None
    assert ("k", ["all_reduce"]) == (model.chosen.label, [move.kind for move in model.chosen.moves])
    assert {"k", "replicate", "i", "j"} == {alternative.label for alternative in model.alternatives}
    replicate = next(alternative for alternative in model.alternatives if alternative.label == "replicate")
    assert [("x", "all_gather", 72.0), ("w", "all_gather", 96.0)] == [
        (m.value, m.kind, m.bytes) for m in replicate.moves
    ]
    assert replicate.replanned is not None
    assert 72.0 + 96.0 - 72.0 == replicate.replanned.bytes  # the all_reduce of 72 bytes is saved
    assert f"relu requires P('data') at test_explain.py:{layer.__code__.co_firstlineno + 1}" in str(found)
    assert "operand w (in_specs) is P('model'), taken as P('model')" in str(found)
    assert found.operation is not None
    assert str(found) == str(layer_plan().explain(found.operation.name, exact=True))


def test_pins_are_named_with_their_places() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = spmd.constrain(x * 2, P(None, "model"))
        return torch.relu((y @ w).reshape(-1))

    mesh = spmd.make_mesh({"data": 2, "model": 4}, runtime="abstract")
    plan = spmd.jit(f, (P("data"), P()), P(), mesh=mesh).plan(torch.empty(6, 8), torch.empty(8, 4))
    line = f.__code__.co_firstlineno + 1
    assert [f"constrained: P(None, 'model') at test_explain.py:{line}"] == list(map(str, plan.explain("mul").pins))
    assert ["out_specs of result 0: P()"] == list(map(str, plan.explain("relu").pins))
    assert ["in_specs: P('data')"] == list(map(str, plan.explain("%x").pins))
    assert "a constrained value" in str(plan.explain("constrain"))
    assert "an input" in str(plan.explain("w"))
    assert "operand constrain (constrained) is P(None, 'model')" in str(plan.explain("mm"))


def test_values_and_operations_are_as_good_as_names() -> None:
    plan = layer_plan()
    named = str(plan.explain("mm"))
    for operation in plan.graph.operations:
        if operation.name == "mm":
            assert named == str(plan.explain(operation)) == str(plan.explain(operation.tensors[0]))
    moved = next(operation for operation in plan.graph.operations if operation.name == "redistribute")
    assert named == str(plan.explain(moved)) == str(plan.explain("mm_reduced"))


def test_arguments_may_be_asked_for_by_path() -> None:
    def f(params: dict[str, list[torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ params["w"][0]) @ params["w"][1]

    mesh = spmd.make_mesh({"model": 2}, runtime="abstract")
    step = spmd.jit(f, (P(), P()), P(), mesh=mesh)
    plan = step.plan({"w": [torch.empty(8, 8), torch.empty(8, 8)]}, torch.empty(8, 8))
    named = str(plan.explain("params_w_1"))
    assert "%params_w_1" in named
    assert [named] * 3 == [str(plan.explain(path)) for path in ("0['w'][1]", "0.w[1]", "0.w.1")]
    assert "%x" in str(plan.explain("1"))
    with pytest.raises(spmd.PlanError, match=r"'0.w' names 2 arguments: 0\['w'\]\[0\], 0\['w'\]\[1\]\. Ask for one"):
        plan.explain("0.w")
    with pytest.raises(spmd.PlanError, match=r"no value \"0\['w'\]\[2\]\"\. Close names: .*0\['w'\]\[1\]"):
        plan.explain("0['w'][2]")


def test_unknown_names_are_answered_with_close_ones() -> None:
    with pytest.raises(spmd.PlanError, match=r"The plan has no value 'mmm'\. Close names: mm. print\(plan\) shows"):
        layer_plan().explain("mmm")
    other = layer_plan().graph.operations[0].tensors[0]
    with pytest.raises(spmd.PlanError, match="is not of this plan"):
        Plan.explain(gpt_plan(P(), P("x")), other)
    with pytest.raises(spmd.PlanError, match="No mesh axis 'z' of more than one rank: data, model"):
        layer_plan().explain("mm")["z"]


@pytest.mark.parametrize(
    ("specs", "tokens"), [(P(), P("x")), (P("x"), P("x")), (TENSOR_PARALLEL, P())], ids=["dp", "fsdp", "tp"]
)
def test_no_alternative_is_better_than_the_choice_of_an_exact_search(specs: object, tokens: P) -> None:
    plan = gpt_plan(specs, tokens)
    assert plan.exact
    explained, explainer = 0, Explainer.of(plan)
    for operation in plan.request.graph.operations:
        (axis,) = explainer.explain(operation.tensors[0]).axes
        extras = [alternative.extra_seconds for alternative in axis.alternatives]
        assert min(extras) >= -1e-12
        explained += len(extras) > 1
    assert explained > 20


def test_planned_anew_costs_at_most_what_it_costs_with_all_else_kept() -> None:
    (axis,) = gpt_plan(TENSOR_PARALLEL, P()).explain("gelu", exact=True).axes
    others = [alternative for alternative in axis.alternatives if not alternative.chosen]
    assert others
    for alternative in others:
        assert alternative.replanned is not None
        assert -1e-12 <= alternative.replanned.seconds <= alternative.extra_seconds + 1e-12


def test_planned_anew_is_what_a_constraint_gives() -> None:
    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu().sum(0)

    def constrained(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return spmd.constrain(x @ w, P(None, "x")).relu().sum(0)

    mesh = spmd.make_mesh({"x": 4}, runtime="abstract")
    args = torch.empty(512, 64), torch.empty(64, 1024)
    first, second = (spmd.jit(f, (P("x"), P()), P(), mesh=mesh).plan(*args) for f in (plain, constrained))
    (axis,) = first.explain("mm", exact=True).axes
    columns = next(alternative for alternative in axis.alternatives if alternative.results == ("P(None, 'x')",))
    assert columns.replanned is not None
    assert second.seconds - first.seconds == pytest.approx(columns.replanned.seconds, rel=1e-9)
    sent = [sum(comm.bytes for comm in plan.comms) for plan in (first, second)]
    assert sent[1] - sent[0] == columns.replanned.bytes


def test_what_would_gather_an_argument_that_is_kept_is_impossible() -> None:
    mesh = spmd.make_mesh({"model": 4}, runtime="abstract")
    step = spmd.jit(layer, (P(), P("model")), P(), mesh=mesh, keep_sharded={1: "model"})
    (axis,) = step.plan(torch.empty(64, 32), torch.empty(32, 64)).explain("mm", exact=True).axes
    impossible = [alternative for alternative in axis.alternatives if "impossible" in str(alternative)]
    assert {"replicate", "i"} == {alternative.label for alternative in impossible}
    assert all("impossible (impossible with all else as planned)" in str(item) for item in impossible)
    assert axis.chosen not in impossible


def test_exact_figures_order_the_alternatives() -> None:
    plan, moved = gpt_plan(TENSOR_PARALLEL, P()), 0
    for number, operation in enumerate(plan.request.graph.operations[:40]):
        if moved and number > 12:
            break
        for axis in plan.explain(operation, exact=True).axes:
            others = [alternative for alternative in axis.alternatives if not alternative.chosen]
            exact = [alternative.replanned.seconds for alternative in others if alternative.replanned is not None]
            assert sorted(exact) == exact
            moved += sorted(alternative.extra_seconds for alternative in others) != [a.extra_seconds for a in others]
    assert moved, "the two orders are the same here: take another program"


def test_needs_are_moves_to_what_the_alternative_requires() -> None:
    """The value of two consumers that require different specs is moved for both; each needs its own move only."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = spmd.constrain(torch.tanh(x), P("model"))
        return torch.relu(spmd.constrain(y, P(None, "model"))), y @ w

    mesh = spmd.make_mesh({"model": 4}, runtime="abstract")
    plan = spmd.jit(f, (P("model"), P()), (P(None, "model"), P()), mesh=mesh).plan(
        torch.empty(512, 256, device="meta"), torch.empty(256, 256, device="meta")
    )
    (axis,) = plan.explain("mm").axes
    held = next(neighbour.has for neighbour in axis.neighbours if neighbour.name.startswith("constrain"))
    for alternative in axis.alternatives:
        operand = [move for move in alternative.moves if move.value == "constrain"]
        assert bool(operand) == (alternative.operands[0] != held)


def test_specs_of_atoms_can_be_typed() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, code: str = "") -> torch.Tensor:
        mm = torch.relu(torch.nn.functional.linear(x, w)).reshape(-1, 32)
        return torch.tanh(eval(code, {"spmd": spmd, "P": P}, {"relu_flat": mm}) if code else mm)

    mesh = spmd.make_mesh({"data": 2, "model": 4}, runtime="abstract")
    args = torch.empty(16, 128, 64, device="meta"), torch.empty(32, 64, device="meta")

    def plan(code: str) -> Plan:
        step = spmd.jit(f, (P(None, "data"), P("model")), None, mesh=mesh, static_argnames="code")
        return step.plan(*args, code=code)

    def flat_layouts(plan: Plan) -> set[str]:
        return {str(plan.layout(value)) for value in plan.specs if value.meta.shape == (2048, 32)}

    found = plan("").explain("mm")
    text = str(found)
    assert "i.1: the 128 of dim 0 (16·128) of mm" in text or "i.1: the 128 of dim 0 (16·128) of view" in text
    assert "along data (2 ranks): shards the 128 of dim 0 (16·128)" in text
    typed = {spec: code for axis in found.axes for spec, code in axis.typed.items()}
    assert "P((16·128@data))" in typed
    assert "P((16@model·128@data))" in typed
    for spec, code in typed.items():
        assert f"to ask for {spec}: {code}" in text
        if "partial" not in spec and code.startswith("spmd.constrain(mm."):
            assert spec in flat_layouts(plan(code.replace("(mm.", "(relu_flat.")))
    assert "P((16@model·128@data))" not in flat_layouts(plan(""))


def test_values_of_a_program_without_operations_are_explained() -> None:
    mesh = spmd.make_mesh({"data": 2, "model": 4}, runtime="abstract")
    plan = spmd.jit(lambda x: x, P("data"), P(), mesh=mesh).plan(torch.empty(8, 4))
    found = plan.explain("x")
    assert ("data", "model") == tuple(axis.axis for axis in found.axes)
    assert "out_specs of result 0 requires P()" in str(found)
