"""Derivatives and batches of functions under `shard_map`, where JAX has tests of its own `shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from manual_cases import (
    EIGHT,
    GRID,
    HOW,
    LINE,
    PAIR,
    WIDE,
    arange,
    assert_same,
    call,
    held,
    randn,
    spec_of,
    varying,
)
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, linearize, vjp, vmap

import spmd
from spmd import P, collectives

SIN_COS = lambda a: a.cos().sin()  # noqa: E731
ROWS = P("x")


def mapped(body: Callable[..., Any], mesh: spmd.Mesh = LINE, ins: Any = ROWS, outs: Any = ROWS, **options: Any) -> Any:
    return spmd.shard_map(body, mesh, ins, outs, **options)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("spec", [P("x", "y"), P("x"), P(None, ("y", "x"))], ids=str)
def test_forward_derivatives(spec: P, how: str) -> None:
    f = mapped(SIN_COS, GRID, spec, spec)
    x, t = randn(4, 4), randn(4, 4) / 2
    first = lambda g: lambda x, t: jvp(g, (x,), (t,))  # noqa: E731
    second = lambda g: lambda x, t: jvp(lambda x: jvp(g, (x,), (t,))[1], (x,), (t,))  # noqa: E731
    assert_same(call(how, first(f), GRID, (spec, spec), x, t), first(SIN_COS)(x, t))
    assert_same(call(how, second(f), GRID, (spec, spec), x, t), second(SIN_COS)(x, t))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape, spec", [((4, 4), P("x", "y")), ((4,), P("x"))], ids=["matrix", "vector"])
def test_linearize_agrees_with_jvp(shape: tuple[int, ...], spec: P, how: str) -> None:
    f = mapped(SIN_COS, GRID, spec, spec)
    linear = lambda x: (lambda y, g: (y, g(x)))(*linearize(f, x))  # noqa: E731
    x = arange(*shape)
    assert_same(call(how, linear, GRID, (spec,), x), jvp(SIN_COS, (x,), (x,)))


EXPANDED = pytest.mark.xfail(
    strict=True, raises=spmd.TraceError, reason="torch copies the tangent of an expanded tensor into an expanded tensor"
)


@pytest.mark.parametrize("order", [1, pytest.param(2, marks=EXPANDED)])
def test_forward_derivatives_of_a_closed_over_value(order: int) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (3 * x).sin().sum()
        return mapped(lambda a: 2 * a * y)(arange(8))

    def derivative(g: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        first = lambda x: jvp(g, (x,), (x,))[1]  # noqa: E731
        return first if order == 1 else lambda x: jvp(first, (x,), (x,))[1]

    x = randn(8)
    expected = derivative(lambda x: 2 * arange(8) * (3 * x).sin().sum())(x)
    assert_same(call("inside", derivative(f), LINE, (ROWS,), x), expected)


@pytest.mark.parametrize(
    "transform", [grad, hessian, lambda f: lambda x: linearize(f, x)[1](x)], ids=["grad", "hessian", "linearize"]
)
def test_derivatives_of_a_closed_over_value(transform: Any) -> None:
    f = lambda x: mapped(lambda a: a.sin() * x.sin().sum())(arange(8)).sum()  # noqa: E731
    reference = lambda x: (arange(8).sin() * x.sin().sum()).sum()  # noqa: E731
    x = randn(6)
    assert_same(call("inside", transform(f), LINE, (P(),), x), transform(reference)(x))


@pytest.mark.parametrize("weight", ["closed over", "argument"])
def test_a_loss_summed_in_the_body(weight: str) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        body = lambda a, w: collectives.psum(((w * a) ** 2).sum(), "x")  # noqa: E731
        if weight == "argument":
            return mapped(body, LINE, (ROWS, P()), P())(x, w)
        return mapped(lambda a: body(a, w), LINE, ROWS, P())(x)

    w, x = torch.tensor(3.0, dtype=torch.float64), arange(8)
    assert_same(call("inside", grad(loss, (0, 1)), LINE, (P(), ROWS), w, x), (6 * (x**2).sum(), 18 * x))


def test_a_function_without_arguments_of_a_closed_over_scalar() -> None:
    f = grad(lambda x: mapped(lambda: x.sin(), WIDE, (), P())())
    x = torch.tensor(2.0)
    assert_same(call("inside", f, WIDE, (P(),), x), x.cos())


@pytest.mark.parametrize("how", HOW)
def test_reverse_derivatives_of_sharded_and_whole_operands(how: str) -> None:
    body = lambda a, b: a.sin() + 3 + torch.tensor(2.0).tan() * a.cos() + b  # noqa: E731
    f = mapped(body, GRID, (ROWS, P()), ROWS)
    reference = lambda x, y: body(x.view(2, 4), y).flatten()  # noqa: E731
    x, y, weights = arange(8) / 10, arange(4) / 10, randn(8)
    loss = lambda g: lambda x, y, w: (g(x, y) ** 2 * w).sum()  # noqa: E731
    specs = (ROWS, P(), ROWS)
    assert_same(
        call(how, grad(loss(f), (0, 1)), GRID, specs, x, y, weights), grad(loss(reference), (0, 1))(x, y, weights)
    )
    hessians = hessian(loss(reference), (0, 1))(x, y, weights)
    assert_same(call(how, hessian(loss(f), (0, 1)), GRID, specs, x, y, weights), hessians)


@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
def test_gradients_do_not_depend_on_the_check(check: bool) -> None:
    f = mapped(lambda q, k, v: q * k[None] + v[None], LINE, (ROWS, P(), P()), ROWS, check=check)
    q, k, v = randn(4, 8), randn(8), randn(8)
    loss = lambda g: lambda q, k, v: (g(q, k, v) ** 2).sum()  # noqa: E731
    expected = grad(loss(lambda q, k, v: q * k + v), (0, 1, 2))(q, k, v)
    assert_same(call("outside", grad(loss(f), (0, 1, 2)), LINE, (ROWS, P(), P()), q, k, v), expected)


@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
def test_the_gradient_in_the_body_of_a_summed_loss(check: bool) -> None:
    body = grad(lambda a: (collectives.psum(a.sum(), "x") ** 2) / 2)
    assert_same(mapped(body, EIGHT, ROWS, ROWS, check=check)(arange(8)), torch.full((8,), 28.0, dtype=torch.float64))


def sent(program: spmd.api.jit.Jitted, *args: torch.Tensor) -> list[str]:
    """The collectives of the backward pass of a program."""
    return [comm.kind for comm in program.plan(*args).comms if comm.source.backward]


def transposed(body: Callable[[torch.Tensor], torch.Tensor], ins: P, outs: P) -> spmd.api.jit.Jitted:
    f = mapped(body, LINE, ins, outs)
    return spmd.jit(lambda x, t: vjp(f, x)[1](t)[0], (ins, outs), ins, mesh=LINE)


def test_the_transpose_of_the_identity_sends_nothing() -> None:
    program = transposed(lambda a: a, P(), P())
    assert_same(program(arange(1), arange(1) + 3), arange(1) + 3)
    assert () == program.plan(arange(1), arange(1)).comms
    f = mapped(lambda a: a, LINE, P(), P())
    twice = spmd.jit(lambda x: vjp(lambda t: vjp(f, x)[1](t)[0], x)[1](x)[0], (P(),), mesh=LINE)
    assert_same(twice(arange(2)), arange(2))
    assert () == twice.plan(arange(2)).comms


def test_the_transpose_of_a_copy_to_all_ranks_is_a_sum() -> None:
    program = transposed(lambda a: a, P(), ROWS)
    assert_same(program(arange(1), arange(4)), torch.tensor([6.0], dtype=torch.float64))
    assert ["all_reduce"] == [comm.kind for comm in program.plan(arange(1), arange(4)).comms]


def test_the_transpose_of_a_sum_is_a_copy_to_all_ranks() -> None:
    program = transposed(lambda a: collectives.psum(a, "x"), ROWS, P())
    assert_same(program(arange(4), arange(1) + 7), torch.full((4,), 7.0, dtype=torch.float64))
    assert [] == sent(program, arange(4), arange(1))


def test_a_sum_that_varies_again_is_its_own_transpose() -> None:
    program = transposed(lambda a: collectives.psum(a, "x"), ROWS, ROWS)
    assert_same(program(arange(4), arange(4)), torch.full((4,), 6.0, dtype=torch.float64))
    assert ["all_reduce"] == sent(program, arange(4), arange(4))


def test_sums_in_a_loop_are_summed_in_each_round() -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            a = collectives.pcast(collectives.psum(a, "x"), "x")
            assert varying("x") == held(a)
        return a

    program = transposed(body, ROWS, ROWS)
    assert_same(program(arange(4), arange(4)), torch.full((4,), 24.0, dtype=torch.float64))
    assert ["all_reduce"] * 2 == sent(program, arange(4), arange(4))


def test_integers_and_results_that_do_not_depend_on_them() -> None:
    f = mapped(lambda a, n: (a * 2, n), LINE, (ROWS, P()), (ROWS, P()))
    total = mapped(lambda a, n: collectives.psum((a * n[:2]).sum(), "x"), LINE, (ROWS, P()), P())
    x, n = arange(8), torch.arange(8)
    expected = 2 * torch.tensor([0.0, 1, 0, 1, 0, 1, 0, 1], dtype=torch.float64)
    assert_same(call("outside", grad(lambda x, n: total(*f(x, n))), LINE, (ROWS, P()), x, n), expected)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dead", [0, 1])
def test_a_result_that_no_loss_uses(dead: int, how: str) -> None:
    f = mapped(lambda a: a.chunk(2)[1 - dead], PAIR)
    loss = lambda x: 0.1 * f(x).mean()  # noqa: E731
    expected = torch.tensor([0.0, 1, 0, 1] if dead == 0 else [1.0, 0, 1, 0], dtype=torch.float64).repeat_interleave(2)
    assert_same(call(how, grad(loss), PAIR, (ROWS,), arange(8)), expected * 0.1 / 4)


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 1), (0, 2), (0,), (1,)], ids=str)
def test_what_no_result_needs_is_not_computed(used: tuple[int, ...]) -> None:
    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        body = lambda y, z: (x.sin(), z.cos(), y.tan())  # noqa: E731
        results = mapped(body, WIDE, (P("x", "y"), P(None, "x")), (P(), P(None, "x"), P("x", "y")))(y, z)
        return [results[number] for number in used]

    x, y, z = randn(4, 4), randn(8, 8), randn(16, 16)
    program = spmd.jit(f, (P(), P("x", "y"), P(None, "x")), mesh=WIDE)
    assert_same(program(x, y, z), [(x.sin(), z.cos(), y.tan())[number] for number in used])
    found = {str(operation.op) for operation in program.plan(x, y, z).graph.operations}
    names = [f"aten.{name}.default" for name in ("sin", "cos", "tan")]
    assert {names[number] for number in used} == found & set(names)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("forwarded, returned", [(0, 0), (1, 2), (2, 1), (3, 3)])
def test_operands_that_are_results(forwarded: int, returned: int, how: str) -> None:
    def body(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [c, a, b]
        rest = [x.exp() if number < returned else x.sin() for number, x in enumerate(given[: 3 - forwarded])]
        outs = [*given[:forwarded], *rest]
        return outs[1], outs[2], outs[0]

    f = mapped(body, PAIR)
    args = tuple(randn(2, size) for size in (3, 4, 5))
    loss = lambda g: lambda *args: sum((y**2).sum() for y in g(*args))  # noqa: E731
    expected = grad(loss(body), (0, 1, 2))(*args)
    assert_same(call(how, grad(loss(f), (0, 1, 2)), PAIR, (ROWS,) * 3, *args), expected)


@pytest.mark.parametrize("how", HOW)
def test_the_gradient_of_a_slice(how: str) -> None:
    f = mapped(lambda a: a.narrow(0, 1, 2), PAIR)
    mask = torch.tensor([0.0, 1, 1, 0, 0, 0, 0, 0], dtype=torch.float64).repeat(2)
    x = arange(16)
    assert_same(call(how, grad(lambda x: (f(x) ** 2).sum()), PAIR, (ROWS,), x), 2 * x * mask)


@pytest.mark.parametrize("how", HOW)
def test_a_gradient_has_the_spec_of_its_operand(how: str) -> None:
    gradient = call(how, grad(lambda x: (mapped(lambda a: a * 2, PAIR)(x) ** 2).sum()), PAIR, (ROWS,), arange(8))
    assert_same(gradient, 8 * arange(8))
    assert how == "inside" or spec_of(gradient) == ROWS


# Gradients in the body.


def test_value_and_gradient_in_the_body() -> None:
    body = lambda a: tuple(leaf.reshape(-1) for leaf in grad_and_value(lambda a: (a**2).mean())(a))  # noqa: E731
    gradient, value = mapped(body, PAIR)(arange(4))
    assert_same((gradient, value), (arange(4), torch.tensor([0.5, 6.5], dtype=torch.float64)))


def test_jacobians_in_the_body() -> None:
    w, x, y = randn(6, 8), randn(20, 6), randn(12, 6)
    f = lambda w, xs: tuple((z @ w).sum(-1) for z in xs)  # noqa: E731

    def body(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = jacrev(f, argnums=1)(w, (x, y))
        assert [[varying("x"), varying("y")]] * 2 == [[held(block) for block in row] for row in rows]
        return rows

    outs = ((P("x"), P("y")), (P("x"), P("y")))
    blocks = spmd.shard_map(body, GRID, (P(), P("x"), P("y")), outs)(w, x, y)
    (xx, xy), (yx, yy) = ([leaf.full_tensor() for leaf in row] for row in blocks)
    own = lambda z: torch.cat([jacrev(lambda z: (z @ w).sum(-1))(half) for half in z.chunk(2)])  # noqa: E731
    assert_same((xx, yy), (own(x), own(y)))
    assert 0 == xy.abs().sum() == yx.abs().sum()


def test_a_cotangent_of_ones_for_a_varying_result() -> None:
    f = lambda p, row: torch.einsum("i,i->", row, p)  # noqa: E731

    def body(p: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def one(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, back = vjp(f, p, row)
            assert varying("x") == held(y) == held(torch.ones_like(y) * y)
            return back(torch.ones_like(y))

        pairs = [one(row) for row in x]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])

    p, x = randn(5), randn(8, 5)
    of_p, of_x = mapped(body, PAIR, (P(), ROWS), (P(), ROWS))(p, x)
    assert_same(of_p, x.view(2, 4, 5).sum(0))  # p is invariant, so its gradient is that of all ranks
    assert_same(of_x, p.expand(8, 5))


@pytest.mark.parametrize("how", ["argument", "closed over"])
def test_gradients_in_the_body_of_what_a_loss_does_not_use(how: str) -> None:
    def update(params: torch.Tensor, batch: torch.Tensor) -> Any:
        body = lambda batch, params: grad_and_value(lambda _, batch: batch.sum())(params, batch)  # noqa: E731
        if how == "argument":
            return mapped(body, PAIR, (ROWS, P()), P(), check=False)(batch, params)
        return mapped(lambda batch: body(batch, params), PAIR, ROWS, P(), check=False)(batch)

    x = arange(4, 8)
    gradient, value = spmd.jit(update, (P(), ROWS), mesh=PAIR)(x, x)
    assert_same((gradient, value), (torch.zeros(4, 8, dtype=torch.float64), x[:2].sum()))


def test_gradients_in_the_body_of_closed_over_parameters_for_each_row() -> None:
    def update(params: torch.Tensor, batch: torch.Tensor) -> Any:
        loss = lambda params, row: params.sum() + row.sum()  # noqa: E731
        body = lambda batch: vmap(lambda row: grad_and_value(loss)(collectives.pcast(params, "x"), row))(batch)  # noqa: E731
        return mapped(body, PAIR, ROWS, ROWS)(batch)

    x = arange(4, 8)
    gradient, value = spmd.jit(update, (P(), ROWS), mesh=PAIR)(x, x)
    assert_same((gradient, value), (torch.ones(4, 4, 8, dtype=torch.float64), x.sum() + x.sum(1)))


def test_the_transpose_of_a_linearized_function_of_a_varying_value() -> None:
    def body(t: torch.Tensor) -> torch.Tensor:
        p = collectives.pcast(torch.ones(1, dtype=t.dtype), "x")
        _, forward = linearize(lambda p: (p**2).mean(), p)
        (back,) = vjp(lambda p: (p**2).mean(), p)[1](forward(t))
        return back

    assert_same(mapped(body, PAIR)(torch.tensor([1.0, 5.0])), torch.tensor([4.0, 20.0]))


# Batches.


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("spec", [P("y"), P()], ids=str)
def test_vmap_of_a_body(spec: P, how: str) -> None:
    f = spmd.shard_map(lambda a: 2 * a, GRID, spec, spec)
    assert_same(call(how, vmap(f), GRID, (P(None, *spec.dims),), arange(8, 8)), 2 * arange(8, 8))


@pytest.mark.parametrize("how", HOW)
def test_vmap_of_a_sum(how: str) -> None:
    f = spmd.shard_map(lambda a: collectives.psum(a, "y"), GRID, P("y"), P())
    x = arange(2, 8)
    assert_same(call(how, vmap(f), GRID, (P(None, "y"),), x), x.view(2, 2, 4).sum(1))


@pytest.mark.parametrize("how", HOW)
def test_vmap_of_a_product_with_one_operand_shared(how: str) -> None:
    f = spmd.shard_map(lambda a, b: a * b, GRID, (P("y"), P()), P("y"))
    x, y = arange(2, 4), randn(2)
    assert_same(call(how, vmap(f, (0, None)), GRID, (P(None, "y"), P()), x, y), x * y.repeat(2))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
def test_vmap_of_a_gradient(check: bool, how: str) -> None:
    f = spmd.shard_map(lambda a: collectives.psum(a.sum(), "y").sin(), GRID, P("y"), P(), check=check)
    x = arange(4, 4)
    assert_same(call(how, vmap(grad(f)), GRID, (P(None, "y"),), x), x.sum(1, keepdim=True).cos().expand(4, 4))


@pytest.mark.parametrize("how", HOW)
def test_vmap_of_a_gradient_with_saved_values(how: str) -> None:
    f = spmd.shard_map(torch.sin, WIDE, P("y"), P("y"))
    x = randn(4, 16)
    assert_same(call(how, vmap(grad(lambda row: f(row).sum())), WIDE, (P(None, "y"),), x), x.cos())


def test_vmap_in_the_body_of_the_index_of_the_rank() -> None:
    rows = lambda a: vmap(lambda b: collectives.axis_index("x") + 0 * b)(a)  # noqa: E731
    assert_same(mapped(rows, PAIR, P(), P(), check=False)(torch.arange(8)), torch.zeros(8, dtype=torch.int64))
    assert_same(mapped(rows, PAIR, P(), ROWS)(torch.arange(4)), torch.arange(2).repeat_interleave(4))
