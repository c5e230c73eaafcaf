"""DTensors that were donated and dropped hold the results of later calls; nobody can see that they did before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.api.values import result_wrappers
from spmd.errors import ShardingError

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")


def step_of() -> spmd.Jitted:
    return spmd.jit(lambda x: x + 1, P("x"), P("x"), mesh=MESH, donate_argnums=0)


def start() -> spmd.DTensor:
    return spmd.distribute(torch.zeros(4, 2), P("x"), MESH)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An item for each new DTensor of a result."""
    found: list[None] = []
    wrap = result_wrappers.wrap

    def counted(*args: Any) -> spmd.DTensor:
        found.append(None)
        return wrap(*args)

    monkeypatch.setattr(result_wrappers, "wrap", counted)
    return found


def test_a_loop_makes_two_generations(made: list[None]) -> None:
    specs = {"a": P("x"), "b": P()}
    function = lambda state: ({"a": state["a"] + 1, "b": state["b"] * 2}, state["a"].sum())  # noqa: E731
    step = spmd.jit(function, (specs,), (specs, P()), mesh=MESH, donate_argnums=0)
    state = spmd.distribute({"a": torch.zeros(4), "b": torch.ones(6)}, specs, MESH)
    for number in range(6):
        state, loss = step(state)
        assert loss.item() == 4 * number
        assert torch.equal(state["a"].full_tensor(), torch.full((4,), number + 1.0))
        assert torch.equal(state["b"].full_tensor(), torch.full((6,), 2.0 ** (number + 1)))
    assert len(made) == 2 * 2 + 6  # of the state, and the losses, which nothing was donated for


def test_what_is_held_is_left_alone(made: list[None]) -> None:
    step, x, held = step_of(), start(), []
    for _ in range(6):
        held.append({"x": x})
        x = step(x)
    assert len(made) == 6
    for old in held:
        with pytest.raises(ShardingError, match="donated"):
            old["x"].full_tensor()
    assert torch.equal(x.full_tensor(), torch.full((4, 2), 6.0))


def test_a_weak_reference_ends_with_its_tensor(made: list[None]) -> None:
    step, x, references = step_of(), start(), []
    for _ in range(5):
        x = step(x)
        references.append(weakref.ref(x))
    gc.collect()
    assert sum(reference() is None for reference in references) >= 3
    assert len(made) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x, "note", "mine"),
        lambda x: setattr(x, "grad", start()),
        lambda x: x.requires_grad_().requires_grad_(False),
        lambda x: x[:2],
        lambda x: x.view(8).add_(1),
        lambda x: setattr(x, "data", start() + 5),
        lambda x: setattr(x, "data", start().t().contiguous().t() * 2),
    ],
    ids=["attribute", "grad", "requires_grad", "view", "written view", "data", "strides"],
)
def test_a_changed_one_is_not_used_again(change: Callable[[spmd.DTensor], object]) -> None:
    step, x = step_of(), start()
    for _ in range(8):
        x = step(x)
        assert not hasattr(x, "note") and x.grad is None and not x.requires_grad and x._family is None
        assert x._strides is None
        change(x)
        before = x.full_tensor()
        x = step(x)
        assert torch.equal(x.full_tensor(), before + 1)


def test_a_tensor_that_requires_a_gradient_where_none_is_recorded() -> None:
    step, x = step_of(), start()
    with torch.no_grad():
        for _ in range(6):
            x = step(x)
            assert not x.requires_grad
            torch.Tensor.requires_grad_(x)


def test_inference_mode() -> None:
    step, x = step_of(), start()
    for number in range(9):
        inside = number % 3 == 1
        with torch.inference_mode(inside):
            x = step(x)
        assert x.is_inference() == inside
    assert torch.equal(x.full_tensor(), torch.full((4, 2), 9.0))


def test_one_that_is_donated_twice(made: list[None]) -> None:
    step = spmd.jit(lambda x, y: (x + 1, y + 2), P("x"), P("x"), mesh=MESH, donate_argnums=(0, 1))
    x = start()
    for _ in range(4):
        x, y = step(x, x)
    assert torch.equal(x.full_tensor(), torch.full((4, 2), 4.0))
    assert torch.equal(y.full_tensor(), torch.full((4, 2), 5.0))
    assert len(made) == 8


def test_results_of_autograd_are_new() -> None:
    step = step_of()
    x = start()
    for _ in range(3):
        x = step(step(x))
        found = step(x.requires_grad_())
        found.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.ones(4, 2))
        x = x.detach()


def test_what_autograd_saves() -> None:
    step, x = step_of(), start()
    weight = (start() + 1).requires_grad_()
    for _ in range(3):
        x = step(x)
    product = (weight * x).sum()
    for _ in range(3):
        x = step(x)
    with pytest.raises(ShardingError, match="donated"):
        product.backward()
