"""Ranges of `torch.profiler` in programs: collectives with their causes, and the user's `record_function` blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from workers import Workers, call_on_mesh

import spmd
from spmd import P

X, W = torch.arange(20.0).view(5, 4) / 10, torch.ones(4, 4)


def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with record_function("forward"):
        for _ in range(2):
            with record_function("layer"):
                x = torch.relu(x @ w)
    return x.sin()


def events(call: Callable[[], Any]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return list(profiler.events())


def names(found: list[Any]) -> Counter[str]:
    return Counter(event.name for event in found)


def inside(event: Any) -> list[str]:
    """The names of the ranges and operators around an event, the innermost first."""
    around = []
    while (event := event.cpu_parent) is not None:
        around.append(event.name)
    return around


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
def test_virtual_ranks(axes: dict[str, int]) -> None:
    mesh = spmd.make_mesh(axes, runtime="virtual")
    f = spmd.jit(forward, (P(None, "x"), P("x")), P(), mesh=mesh)
    expected = forward(X, W)
    torch.testing.assert_close(expected, f(X, W).full_tensor())
    x, w = spmd.distribute(X, P(None, "x"), mesh), spmd.distribute(W, P("x"), mesh)
    found = events(lambda: torch.testing.assert_close(expected, f(x, w).full_tensor()))
    for comm in f.plan(X, W).comms:
        assert names(found)[str(comm)] == 1, comm
    assert all({"layer", "forward"} <= set(inside(event)) for event in found if event.name == "aten::mm")
    assert all("forward" not in inside(event) for event in found if event.name == "aten::sin")
    assert "forward" not in names(events(lambda: None))


def test_ranges_of_layers_are_apart() -> None:
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    f = spmd.jit(forward, (P(), P()), mesh=mesh)
    f(X, W)
    found = names(events(lambda: f(X, W)))
    assert found["layer"] == 2 * found["forward"] > 0


def test_backward_passes_and_other_threads() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with record_function("loss"):
            return (x @ w).square().sum()

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        gradient = torch.func.grad(loss)(w, x)
        with record_function("update"):
            return w - gradient

    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    f = spmd.jit(step, (P(), P("x")), P(), mesh=mesh)
    f(W, X)
    found = events(lambda: f(W, X))
    around = {event.name: inside(event) for event in found}
    assert "update" in around["aten::sub"]
    assert ["loss" in inside(event) for event in found if event.name == "aten::mm"].count(True) >= 2
    assert any(re.match(r"all_reduce over x, .* at test_profiler_ranges.py:\d+", name) for name in names(found))


def test_an_error_leaves_no_range_open() -> None:
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")

    def look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        with record_function("look up"):
            return table[index]

    f = spmd.jit(look_up, (P(), P()), mesh=mesh)
    f(W, torch.tensor([0]))

    def call() -> None:
        with pytest.raises(IndexError):
            f(W, torch.tensor([9]))
        W.cos()

    found = events(call)
    assert names(found)["look up"] == 1
    assert [[]] == [inside(event) for event in found if event.name == "aten::cos"]


def _profiled(mesh: spmd.Mesh) -> list[str]:
    f = spmd.jit(forward, (P(None, "x"), P("x")), P(), mesh=mesh)
    f(X, W)
    found = events(lambda: f(X, W))
    torch.testing.assert_close(forward(X, W), f(X, W).full_tensor())
    assert all({"layer", "forward"} <= set(inside(event)) for event in found if event.name == "aten::mm")
    return [event.name for event in found if "test_profiler_ranges.py" in event.name]


def test_processes(workers: Workers) -> None:
    first, second = workers.run(call_on_mesh, _profiled, {"x": 2}, "distributed", ranks=2)
    assert first == second
    assert {"start", "finish"} == {name.split()[0] for name in first}
    assert all(re.match(r"\w+ (all|reduce)_\w+ over x, .* bytes.*: .* requires .*, at test_", name) for name in first)
