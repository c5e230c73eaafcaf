"""Operators without a sharding rule: a warning where shards are gathered for them, once for each line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from workers import Workers, call_on_mesh

import spmd
from spmd import P
from spmd.api.programs import missing_rules
from spmd.api.programs.missing_rules import MissingRuleWarning
from spmd.rules import RULES, pointwise

MESH = spmd.make_mesh({"x": 3}, runtime="virtual")
X = torch.arange(20.0).view(5, 4)


@torch.library.custom_op("missing_rules::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


double.register_fake(torch.empty_like)
DOUBLE = torch.ops.missing_rules.double.default


@pytest.fixture(autouse=True)
def _first_warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(missing_rules, "_warned", set())
    return


def twice(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = double(x.t().contiguous()) + 1
    return x


def warnings_of(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if one.category is MissingRuleWarning]


def test_one_warning_a_line_with_the_bytes() -> None:
    f = spmd.jit(twice, P("x"), mesh=MESH)
    (found,) = warnings_of(lambda: f.plan(X))
    sent = sum(comm.bytes for comm in f.plan(X).comms if comm.kind == "all_gather")
    assert found.startswith("missing_rules.double.default at test_missing_rules.py:")
    assert f"Gathered for it: f32[5,4] P('x'), {sent:,.0f} bytes that a rank sends in each call" in found
    assert "RULES | {torch.ops.missing_rules.double.default: rule}" in found
    assert warnings_of(lambda: (f(X), spmd.jit(twice, P("x"), mesh=MESH)(X))) == []
    assert torch.equal(twice(X), f(X).full_tensor())


@pytest.mark.parametrize(
    "call",
    [
        lambda: spmd.jit(twice, P(), mesh=MESH)(X),
        lambda: spmd.jit(twice, P("x"), mesh=MESH, rules=RULES | {DOUBLE: pointwise()})(X),
        lambda: spmd.jit(lambda x: double(x.sum()), P("x"), mesh=MESH)(X),  # a sum that is pending is no shard
        lambda: spmd.jit(torch.sin, P("x"), P(), mesh=MESH)(X),
        lambda: spmd.shard_map(double, MESH, P("x"), P("x"))(X),
        lambda: spmd.jit(lambda x: spmd.pure_callback(torch.sin, x, x), P("x"), mesh=MESH)(X),
    ],
    ids=["replicated", "own rule", "reduced", "gathered for the result", "manual", "callback"],
)
def test_no_warning(call: Callable[[], Any]) -> None:
    assert [] == warnings_of(call)


def test_rules_that_leave_others_out() -> None:
    f = spmd.jit(lambda x: x.sort(0).values, P("x"), mesh=MESH, rules={torch.ops.aten.sin.default: pointwise()})
    (found,) = warnings_of(lambda: f(X))
    assert "aten.sort" in found and "rules= leaves it out: write spmd.rules.RULES | {...}" in found


def test_operators_outside_of_jit() -> None:
    x = spmd.distribute(X, P("x"), MESH)
    (found,) = warnings_of(lambda: [double(x) for _ in range(2)])
    assert "at test_missing_rules.py" in found and "Gathered for it: f32[5,4] P('x'), " in found


def test_saved_plans_warn_too(tmp_path: Any) -> None:
    with pytest.warns(MissingRuleWarning):
        spmd.jit(twice, P("x"), mesh=MESH).plan(X).save(tmp_path / "plan.json")
    missing_rules._warned.clear()
    with pytest.warns(MissingRuleWarning, match=r"Gathered for it: f32\[5,4\] P\('x'\)"):
        spmd.jit(twice, P("x"), mesh=MESH, plan=tmp_path / "plan.json").plan(X)


def _on_a_rank(mesh: spmd.Mesh) -> list[str]:
    return warnings_of(lambda: spmd.jit(twice, P("x"), mesh=mesh)(X))


def test_processes(workers: Workers) -> None:
    first, second = workers.run(call_on_mesh, _on_a_rank, {"x": 2}, "distributed", ranks=2)
    assert first == second and len(first) == 1
