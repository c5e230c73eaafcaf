"""Backward passes inside of a jitted function, of arguments that require grad outside, are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd import DTensor, P, TraceError

MESH = spmd.make_mesh({"x": 3, "y": 2}, runtime="virtual")
GENERATOR = torch.Generator().manual_seed(0)
W, X = (torch.randn(*shape, dtype=torch.float64, generator=GENERATOR) for shape in ((4, 3), (5, 4)))


def loss_of(w: Any, x: Any) -> Any:
    return torch.tanh(x @ w).square().sum()


def value_and_gradient(w: Any, x: Any) -> Any:
    loss = loss_of(w, x)
    return loss, torch.autograd.grad(loss, w)


def penalized(w: Any, x: Any) -> Any:
    loss = loss_of(w, x)
    (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
    return loss + gradient.square().sum()


def smooth(w: Any, x: Any) -> Any:
    y = torch.tanh(x @ w)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().sum() + (gradient.norm(dim=1) - 1).square().sum()


def smooth_at_a_copy(w: Any, x: Any) -> Any:
    return smooth(w, x.detach().requires_grad_())


def whole(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, tree)


def detached(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.detach(), whole(tree))


@pytest.mark.parametrize("specs", [None, (None, P("x")), (P("y"), P("x")), (P(None, "x"), P("y"))])
@pytest.mark.parametrize("function", [value_and_gradient, penalized, smooth, smooth_at_a_copy])
def test_autograd_grad_of_arguments(function: Callable[..., Any], specs: Any) -> None:
    found = []
    for f in (spmd.jit(function, specs, mesh=MESH), function):
        w, x = W.clone().requires_grad_(), X.clone().requires_grad_(function is smooth)
        result = f(w, x)
        loss = result[0] if isinstance(result, tuple) else result
        if function is not value_and_gradient:  # on one device its graph is gone
            loss.backward()
        found.append([detached(result), w.grad, x.grad])
    torch.testing.assert_close(*found)


def test_autograd_grad_of_sharded_arguments_and_again() -> None:
    f = spmd.jit(penalized, mesh=MESH)
    for scale in (1.0, 2.0):
        w = spmd.distribute(W * scale, P("x"), MESH).requires_grad_()
        plain = (W * scale).requires_grad_()
        f(w, X).backward()
        penalized(plain, X).backward()
        assert w.grad.spec.pspec == P("x")
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)
    assert f.cache_info().currsize == 1


def test_a_first_call_without_gradients_is_the_error_of_one_device() -> None:
    f, w = spmd.jit(value_and_gradient, mesh=MESH), W.clone()
    for function in (f, value_and_gradient):
        with pytest.raises(RuntimeError, match="does not require grad"):
            function(w, X)
    w.requires_grad_()
    torch.testing.assert_close(detached(f(w, X)), detached(value_and_gradient(w, X)))


def module_gradients(model: nn.Module, x: Any) -> Any:
    loss = model(x).square().sum()
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def module_backward(model: nn.Module, x: Any) -> Any:
    loss = model(x).square().sum()
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("function", [module_gradients, module_backward])
def test_steps_of_modules(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    f = spmd.jit(function, (None, P("x")), mesh=MESH)
    expected = detached(function(copy.deepcopy(model), X))
    with torch.no_grad():
        loss, gradients = f(model, X)
    torch.testing.assert_close(detached([loss, *gradients]), [expected[0], *expected[1]])
    if function is module_backward:  # which writes to the caller's parameters on one device
        with pytest.raises(TraceError, match=r"call it under torch.no_grad\(\) and return x.grad"):
            f(model, X)
        return
    loss, gradients = f(model, X)
    torch.testing.assert_close(detached([loss, *gradients]), [expected[0], *expected[1]])
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [*expected[1]])


def test_backward_of_inner_tensors_has_a_first_derivative_only() -> None:
    def by_backward(w: Any, x: Any) -> Any:
        x = x.detach().requires_grad_()
        loss_of(w.detach(), x).backward()
        return (x.grad * x).sum() * loss_of(w, x)

    found = []
    for f in (spmd.jit(by_backward, (P("y"), P("x")), mesh=MESH), by_backward):
        w = W.clone().requires_grad_()
        found.append(torch.autograd.grad(f(w, X), w, create_graph=True)[0])
    torch.testing.assert_close(*map(detached, found))
    with pytest.raises(TraceError, match="has no second derivative"):
        found[0].square().sum().backward()


def test_backward_of_an_argument_is_still_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        loss_of(w, x).backward()
        return w.grad

    with pytest.raises(TraceError, match=r"return x\.grad"):
        spmd.jit(step, mesh=MESH)(W.clone().requires_grad_(), X)


def test_copies_of_parameters_are_others() -> None:
    def function(model: Any, x: Any) -> Any:
        return torch.autograd.grad((copy.deepcopy(model)(x) * model(x)).sum(), list(model.parameters()))

    model = nn.Linear(4, 4, dtype=torch.float64)
    found = spmd.jit(function, (None, P("x")), P(), mesh=MESH)(model, X)
    torch.testing.assert_close(detached(spmd.full_tree(found)), detached(function(model, X)))
