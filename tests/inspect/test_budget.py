"""What a plan may send: limits by kind of collective, and errors that say how to keep to them."""

import re
from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.inspect.questions.pins import constrained
from spmd.plan.search.orders import plan as search


def pair(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(x @ up)
    return hidden @ down


LINE = pair.__code__.co_firstlineno
SPECS = (P(), P(None, "model"), P("model"))
SHAPES = (512, 256), (256, 1024), (1024, 256)


def jitted(comms: Any, function: Any = pair, specs: Any = SPECS, out: P = P()) -> Any:  # noqa: B008
    mesh = spmd.make_mesh({"model": 4}, runtime="abstract")
    return spmd.jit(function, specs, out, mesh=mesh, comms=comms)


def planned(comms: Any, **options: Any) -> Any:
    return jitted(comms, **options).plan(*(spmd.TensorMeta(shape, torch.float32) for shape in SHAPES))


ALL_REDUCE = 2 * 3 / 4 * 512 * 256 * 4


@pytest.mark.parametrize(
    "comms",
    ["allow", {}, {"all_gather": 0}, {"all_reduce": 1}, {"all_reduce": "786432B"}, {"all_reduce": "1MB"}],
)
def test_plans_within_the_budget_pass(comms: Any) -> None:
    assert [("all_reduce", ALL_REDUCE)] == [(comm.kind, comm.bytes) for comm in planned(comms).comms]


@pytest.mark.parametrize(
    ("comms", "allowed"),
    [
        ({"all_reduce": 0}, "0"),
        ({"all_reduce": "786431B"}, "786,431 bytes"),
        ({"all_reduce": "0.75MB"}, "750,000 bytes"),
    ],
)
def test_plans_over_the_budget_are_refused_with_the_lines(comms: Any, allowed: str) -> None:
    with pytest.raises(spmd.PlanError) as caught:
        planned(comms)
    lines = str(caught.value).splitlines()
    assert f"comms={comms} forbids what the plan of pair does:" == lines[0]
    assert f"  all_reduce: 1 with 786,432 bytes, allowed {allowed}:" == lines[1]
    assert lines[2].startswith("  all_reduce over model, 786,432 bytes: mm produces P(partial={'model': 'sum'}), ")
    assert lines[2].endswith(f", at test_budget.py:{LINE + 2}")
    assert lines[3].startswith("    to avoid it, ")
    assert "allow it: comms='allow'." in lines[-1]


def test_the_pin_in_the_message_avoids_the_collective() -> None:
    with pytest.raises(spmd.PlanError) as caught:
        planned({"all_reduce": 0})
    assert "give result 0 out_specs P(partial={'model': 'sum'})" in str(caught.value)
    assert () == planned({"all_reduce": 0}, out=P(partial={"model": "sum"})).comms


def test_a_constraint_is_suggested_with_its_cost_and_its_line() -> None:
    def scored(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return torch.relu((x @ up) @ down)

    with pytest.raises(spmd.PlanError) as caught:
        planned({"all_reduce": 0}, function=scored)
    (remedy,) = (line for line in str(caught.value).splitlines() if "to avoid it" in line)
    place = f"test_budget.py:{scored.__code__.co_firstlineno + 1} (`return torch.relu((x @ up) @ down)`)"
    assert remedy.startswith("    to avoid it, constrain relu to P(")
    assert place in remedy
    assert "us and " in remedy

    def pinned(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        spec = eval(remedy.split(" to ")[2].split(" at ")[0], {"P": P})
        return spmd.constrain(torch.relu((x @ up) @ down), spec)

    before, after = planned("allow", function=scored), planned({"all_reduce": 0}, function=pinned)
    extra = 1e6 * (after.seconds - before.seconds)
    assert f"{extra:+.3g} us" in remedy


def test_where_no_pin_helps_the_message_says_so() -> None:
    def running(x: torch.Tensor) -> torch.Tensor:
        return x.exp().cumsum(0)

    mesh = spmd.make_mesh({"model": 4}, runtime="abstract")
    f = spmd.jit(running, P("model"), P("model"), mesh=mesh, comms="error")
    with pytest.raises(spmd.PlanError, match="no pin on either side avoids it"):
        f.plan(spmd.TensorMeta((64,), torch.float32))


@pytest.mark.parametrize(
    ("comms", "message"),
    [
        ({"gather": 0}, r"comms limits the kinds all_reduce, all_gather, .*permute \(got 'gather'\)"),
        ({"all_gather": -1}, r"comms\['all_gather'\] must be how many there may be, .* \(got -1\)"),
        ({"all_gather": True}, r"comms\['all_gather'\] must be how many there may be, .* \(got True\)"),
        ({"all_gather": "20 apples"}, r"comms\['all_gather'\] must be a number of bytes.*\(got '20 apples'\)"),
        (3, r"comms must be one of 'allow', 'error' or a mapping .*\(got 3\)"),
    ],
)
def test_limits_that_mean_nothing_are_refused(comms: Any, message: str) -> None:
    with pytest.raises(spmd.PlanError, match=message):
        jitted(comms)


def test_a_pinned_request_is_that_of_a_constraint() -> None:
    def written(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return spmd.constrain(torch.relu(x @ up), P("model")) @ down

    plan = planned("allow")
    relu = next(o for o in plan.request.graph.operations if o.name == "relu")
    pinned, expected = (
        search(constrained(plan.request, relu.tensors[0], P("model"))),
        planned("allow", function=written),
    )
    assert pinned.comms
    assert [(c.kind, c.bytes) for c in expected.comms] == [(c.kind, c.bytes) for c in pinned.comms]
    assert expected.seconds == pinned.seconds


def two_layers(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ params["up"]) @ params["down"]


def refused(specs: object) -> str:
    mesh = spmd.make_mesh({"model": 4}, runtime="abstract")
    f = spmd.jit(two_layers, (specs, P("model")), P("model"), mesh=mesh, comms="error")
    params = {"up": torch.empty(64, 256, device="meta"), "down": torch.empty(256, 64, device="meta")}
    with pytest.raises(spmd.PlanError) as caught:
        f.plan(params, torch.empty(65536, 64, device="meta"))
    return str(caught.value)


def test_suggestions_name_arguments_by_path_with_their_memory_and_together() -> None:
    message = refused({"up": P("model"), "down": P("model")})
    pins = re.findall(
        r"to avoid it, give (0\[.*?\]) in_specs P\(\): .* us and .* a step, \+([\d,]+) bytes held", message
    )
    assert {"0['down']", "0['up']"} == {path for path, _ in pins}
    assert re.search(r"\n  all 2 at once: .* a step, \+[\d,]+ bytes held, within the budget\n", message)
    mesh = spmd.make_mesh({"model": 4}, runtime="abstract")
    meta = (
        torch.empty(64, 256, device="meta"),
        torch.empty(256, 64, device="meta"),
        torch.empty(65536, 64, device="meta"),
    )
    held = [
        spmd.jit(two_layers, ({"up": spec, "down": spec}, P("model")), P("model"), mesh=mesh)
        .plan({"up": meta[0], "down": meta[1]}, meta[2])
        .memory.peak
        for spec in (P("model"), P())
    ]
    assert f"{held[1] - held[0]:+,} bytes held, within the budget" in message
