"""Loops and branches where tensors have values: against loops of Python, and what jax.lax's tests state of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import spmd
from spmd.core.pytree import tree_leaves


def same(expected: Any, actual: Any) -> None:
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        torch.testing.assert_close(other, torch.as_tensor(one))


def step(w: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    h = torch.tanh(h @ w + x)
    return h, {"h": h, "norm": h.square().sum()}


def by_hand(w: Tensor, h: Tensor, xs: Tensor, reverse: bool) -> Any:
    rows = range(len(xs))
    found: list[Any] = [None] * len(xs)
    for row in reversed(rows) if reverse else rows:
        h, found[row] = step(w, h, xs[row])
    return h, {name: torch.stack([y[name] for y in found]) for name in ("h", "norm")}


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_is_a_loop_with_its_gradients(reverse: bool) -> None:
    w, h, xs = torch.randn(3, 3), torch.randn(3), torch.randn(5, 3)

    def scanned(w: Tensor, h: Tensor, xs: Tensor) -> Any:
        return spmd.scan(lambda h, x: step(w, h, x), h, xs, reverse=reverse)

    def looped(w: Tensor, h: Tensor, xs: Tensor) -> Any:
        return by_hand(w, h, xs, reverse)

    same(looped(w, h, xs), scanned(w, h, xs))
    total: Callable[..., Any] = lambda f: lambda *args: sum(y.sum() for y in tree_leaves(f(*args)))  # noqa: E731
    for transform in (
        lambda f: grad(total(f), (0, 1, 2))(w, h, xs),
        lambda f: hessian(total(f))(w, h, xs),
        lambda f: jvp(f, (w, h, xs), (w, h, xs)),
        lambda f: vmap(f, (None, 0, None))(w, torch.stack([h, 2 * h]), xs),
        lambda f: vmap(grad(total(f)), (None, None, 2))(w, h, torch.stack([xs, 2 * xs], 2)),
    ):
        same(transform(looped), transform(scanned))
    parameters = [tensor.clone().requires_grad_() for tensor in (w, h, xs)]
    expected = torch.autograd.grad(total(looped)(*parameters), parameters)
    same(expected, torch.autograd.grad(total(scanned)(*parameters), parameters))


def test_scan_of_length_and_of_trees() -> None:
    assert (torch.tensor(8), None) == spmd.scan(lambda c, _: (2 * c, None), 1, length=3)
    carry, ys = spmd.scan(lambda c, x: ((c[0] + x["a"][0], None), [c[0], ()]), (0, None), {"a": [torch.arange(4)]})
    same((6, None), carry)
    same([torch.tensor([0, 0, 1, 3]), ()], ys)
    same(((), torch.arange(3)), spmd.scan(lambda c, x: (c, x), (), torch.arange(3)))
    same((1, torch.ones(2, dtype=torch.int64)), spmd.scan(lambda c, x: [1, 1], 1, torch.arange(2), 2))


@pytest.mark.parametrize("unroll", [1, 2, 7, True, False])
def test_unroll_changes_nothing(unroll: int | bool) -> None:
    same((6, [0, 1, 3, 6]), _sums(unroll))


def _sums(unroll: int | bool) -> Any:
    carry, ys = spmd.scan(lambda c, x: (c + x, c + x), 0, torch.arange(4), unroll=unroll)
    return carry, list(ys)


def test_no_trips() -> None:
    carry, ys = spmd.scan(lambda c, x: (c + x.sum(), {"y": (x > 0), "z": 1.0}), 0, torch.ones(0, 2))
    same(0.0, carry)
    assert (torch.Size([0, 2]), torch.bool) == (ys["y"].shape, ys["y"].dtype)
    assert (torch.Size([0]), torch.float32) == (ys["z"].shape, ys["z"].dtype)
    same(3.0, spmd.fori_loop(4, 2, lambda i, x: x + i, 3.0))
    assert torch.Size([0, 5]) == spmd.map(lambda x: x.expand(5), torch.ones(0)).shape
    assert torch.Size([0, 5]) == spmd.map(lambda x: x.expand(5), torch.ones(0), batch_size=2).shape


def test_no_trip_runs_nothing() -> None:
    def f(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        spmd.debug.print("{}", x)
        return spmd.scan(lambda c, x: (c, torch.rand(2)), carry, x[None])[0], torch.rand(3)

    torch.manual_seed(0)
    state = torch.get_rng_state()
    spmd.scan(f, torch.zeros(()), torch.ones(0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("init", "body", "expected"),
    [
        (0, lambda c, x: c + x, torch.tensor(6.0)),
        (0, lambda c, x: c + 1, torch.tensor(3)),
        (0, lambda c, x: c + x.int().sum(dtype=torch.int32), torch.tensor(6)),
        (0, lambda c, x: c.int() + x.int(), torch.tensor(6, dtype=torch.int32)),
        (0.0, lambda c, x: c + x.double(), torch.tensor(6.0, dtype=torch.float64)),
        (0.0, lambda c, x: (c + x).half(), torch.tensor(6.0, dtype=torch.float16)),
        (1, lambda c, x: c * (1 + 0j), torch.tensor(1 + 0j)),
        (True, lambda c, x: c & (x > 0), torch.tensor(True)),
        ((0, 0), lambda c, x: (c[1] + x, c[1] + 1), (torch.tensor(5.0), torch.tensor(3))),
        ((0, 0), lambda c, x: (c[1], c[0] + x), (torch.tensor(2.0), torch.tensor(4.0))),
    ],
)
def test_numbers_have_the_dtype_that_comes_back(init: Any, body: Any, expected: Any) -> None:
    same(expected, spmd.scan(lambda c, x: (body(c, x), None), init, torch.tensor([1.0, 2.0, 3.0]))[0])
    if isinstance(init, int):
        xs = torch.tensor([1.0, 2.0, 3.0])
        same(expected, spmd.fori_loop(0, 3, lambda i, c: body(c, xs[i]), init))


def test_numbers_draw_once_though_the_first_trip_runs_twice() -> None:
    def draws(init: Any) -> Any:
        torch.manual_seed(0)
        return spmd.scan(lambda c, _: (c + torch.rand(()), None), init, length=3)

    same(draws(torch.tensor(0.0)), draws(0))


def test_while_loop() -> None:
    same((4, 15), spmd.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, s[1] * 2 + 1), (0, 0)))
    same({"x": 3.0}, spmd.while_loop(lambda s: False, lambda s: {"x": s["x"] + 1}, {"x": 3.0}))
    same((), spmd.while_loop(lambda s: torch.tensor(False), lambda s: s, ()))
    limit = torch.tensor(10)
    nested = spmd.while_loop(
        lambda s: s[0] < 3,
        lambda s: (s[0] + 1, spmd.while_loop(lambda y: y < limit * s[0], lambda y: y + 3, s[1])),
        (0, 0),
    )
    same((3, 21), nested)
    slope = grad(lambda x: spmd.while_loop(lambda y: y < 10, lambda y: y * y, x))(torch.tensor(2.0))
    same(4 * 2.0**3, slope)


def test_while_loop_of_a_batch_runs_until_all_are_done() -> None:
    xs, limits = torch.tensor([1.0, 3.0, 30.0]), torch.tensor([10.0, 100.0, 5.0])

    def doubled(x: Any, limit: Any) -> Any:
        return spmd.while_loop(lambda s: s["x"] < limit, lambda s: {"x": s["x"] * 2, "n": s["n"] + 1}, {"x": x, "n": 0})

    expected = {"x": torch.tensor([16.0, 192.0, 30.0]), "n": torch.tensor([4, 6, 0])}
    same(expected, vmap(doubled)(xs, limits))
    same(doubled(xs[0], 10), {key: value[0] for key, value in vmap(doubled, (0, None))(xs, 10.0).items()})
    same(torch.tensor([16.0, 128.0]), vmap(doubled, (None, 0))(xs[0], limits[:2])["x"])
    both = vmap(vmap(doubled, (None, 0)), (0, None))(xs, limits)["x"]
    same(torch.stack([vmap(doubled, (None, 0))(x, limits)["x"] for x in xs]), both)
    same(torch.tensor([16.0, 64.0, 1.0]), vmap(grad(lambda x, limit: doubled(x, limit)["x"]))(xs, limits))


def test_fori_loop() -> None:
    def total(first: Any, end: Any) -> Any:
        return spmd.fori_loop(first, end, lambda i, s: {"n": s["n"] + i, "count": s["count"] + 1}, {"n": 0, "count": 0})

    def expected(first: int, end: int) -> Any:
        return {"n": sum(range(first, end)), "count": len(range(first, end))}

    for first, end in ((0, 5), (-2, 3), (3, 3), (4, -1)):
        same(expected(first, end), total(first, end))
        same(expected(first, end), total(torch.tensor(first), torch.tensor(end)))
        same(expected(first, end), total(first, torch.tensor(end)))
        same(expected(first, end), total(torch.tensor(first), end))
    ends = torch.tensor([0, 4, 2])
    same({"n": [0, 6, 1], "count": [0, 4, 2]}, {key: list(v) for key, v in vmap(total, (None, 0))(0, ends).items()})
    same((), spmd.fori_loop(0, 3, lambda i, x: x, ()))
    same(torch.tensor(6.0).int(), spmd.fori_loop(1, 4, lambda i, x: x * i.int(), torch.tensor(1, dtype=torch.int32)))
    same(12.0, grad(lambda x: spmd.fori_loop(0, 3, lambda i, y: y * x, 1.0))(torch.tensor(2.0)))


def test_cond() -> None:
    x = torch.tensor(0.5)
    for pred in (True, torch.tensor(True), 1, 2.5, torch.tensor(-3), torch.tensor(0.1)):
        same(x.sin(), spmd.cond(pred, torch.sin, torch.cos, x))
    for pred in (False, torch.tensor(False), 0, 0.0, torch.tensor(0), torch.tensor(-0.0)):
        same(x.cos(), spmd.cond(pred, torch.sin, torch.cos, x))
    same((3, {"a": 1.0}), spmd.cond(True, lambda: (3, {"a": 1.0}), lambda: (4, {"a": 2.0})))
    same(None, spmd.cond(x > 0, lambda x, y: None, lambda x, y: None, x, {"y": x}))
    clipped = grad(lambda x: spmd.cond(x > 1, lambda x: 3 * x, lambda x: x * x, x))
    same([0.4, 3.0], [clipped(torch.tensor(0.2)), clipped(torch.tensor(2.0))])

    def fib(n: Any) -> Any:
        return spmd.cond(n > 1, lambda: fib(n - 1) + fib(n - 2), lambda: n)

    same(13, fib(torch.tensor(7)))


def test_cond_of_a_batch_selects() -> None:
    xs = torch.tensor([-1.0, 2.0, 3.0])
    function = lambda x, y: spmd.cond(x > 0, lambda: {"a": x * y, "b": x}, lambda: {"a": -y, "b": y})  # noqa: E731
    expected = {"a": torch.tensor([-4.0, 8.0, 12.0]), "b": torch.tensor([4.0, 2.0, 3.0])}
    same(expected, vmap(function, (0, None))(xs, torch.tensor(4.0)))
    same(torch.tensor([0.0, 4.0, 4.0]), vmap(grad(lambda x: function(x, torch.tensor(4.0))["a"]))(xs))
    same(expected["a"] * 2, vmap(lambda x: function(torch.tensor(2.0), x)["a"])(expected["a"]))


def test_switch() -> None:
    branches = [lambda x: x, lambda x: 2 * x, lambda x: x * x, lambda x: -x]
    x, expected = torch.tensor(3.0), [3.0, 3.0, 6.0, 9.0, -3.0, -3.0]
    indexes = (-2, 0, 1, 2, 3, 9)
    same(expected, [spmd.switch(index, branches, x) for index in indexes])
    same(expected, [spmd.switch(torch.tensor(index), branches, x) for index in indexes])
    same(expected, vmap(lambda index: spmd.switch(index, branches, x))(torch.tensor(indexes)).unbind())
    same(6.0, grad(lambda x: spmd.switch(torch.tensor(2), branches, x))(x))
    same(3.0, spmd.switch(torch.tensor(5), branches[:1], x))
    same(5.0, spmd.switch(torch.tensor(5), branches[:2], torch.tensor(2.5)))


def test_both_branches_are_compared_without_effects() -> None:
    ran = []

    def true_fun(x: Tensor) -> Tensor:
        ran.append(type(x) is Tensor)
        spmd.debug.print("{}", x)
        return x + torch.rand(())

    torch.manual_seed(0)
    state = torch.get_rng_state()
    spmd.cond(False, true_fun, lambda x: x, torch.zeros(()))
    assert ([False], True) == (ran, torch.equal(state, torch.get_rng_state()))
    same(2.0, spmd.cond(True, lambda x: x + 1, lambda x: x * x.item(), torch.tensor(1.0)))  # which cannot be traced


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 4, 9])
def test_map(batch_size: int | None) -> None:
    xs = {"a": torch.randn(4, 3), "b": torch.arange(4)}
    function = lambda x: (x["a"].sum() * x["b"], {"c": x["a"]}, 1)  # noqa: E731
    expected = (xs["a"].sum(1) * xs["b"], {"c": xs["a"]}, torch.ones(4, dtype=torch.int64))
    same(expected, spmd.map(function, xs, batch_size=batch_size))
    slopes = grad(lambda a: spmd.map(lambda x: x.square().sum(), a, batch_size=batch_size).sum())(xs["a"])
    same(2 * xs["a"], slopes)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 8, 13])
def test_associative_scan(length: int) -> None:
    x = torch.randn(2, length, 3)
    same(x.cumsum(1), spmd.associative_scan(torch.add, x, dim=1))
    same(x.cumsum(1), spmd.associative_scan(torch.add, x, dim=-2))
    same(x.flip(1).cumprod(1).flip(1), spmd.associative_scan(torch.mul, x, True, 1))
    matrices = torch.randn(length, 2, 2)
    products = [torch.eye(2)]
    for matrix in matrices:
        products.append(products[-1] @ matrix)
    same(products[1:], list(spmd.associative_scan(torch.matmul, matrices)))

    def affine(a: Any, b: Any) -> Any:
        return {"slope": a["slope"] * b["slope"], "shift": a["shift"] * b["slope"] + b["shift"]}

    elems = {"slope": torch.randn(length), "shift": torch.randn(length, dtype=torch.float64)}
    shifts = [torch.zeros((), dtype=torch.float64)]
    for slope, shift in zip(elems["slope"], elems["shift"], strict=True):
        shifts.append(shifts[-1] * slope + shift)
    same(shifts[1:], list(spmd.associative_scan(affine, elems)["shift"]))
    weights = torch.randn(2, length, 3)
    expected = grad(lambda x: (x.cumprod(1) * weights).sum())(x)
    same(expected, grad(lambda x: (spmd.associative_scan(torch.mul, x, dim=1) * weights).sum())(x))
