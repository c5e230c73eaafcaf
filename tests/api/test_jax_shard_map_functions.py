"""Functions with their own derivatives, and recomputation, under `shard_map`, where JAX has tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from manual_cases import GRID, HOW, LINE, PAIR, WIDE, arange, assert_same, call, randn
from torch.func import grad, grad_and_value, jvp, vmap
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import P, collectives

ROWS = P("x")
Body = Callable[[torch.Tensor], torch.Tensor]


def mapped(body: Callable[..., Any], mesh: spmd.Mesh = LINE, ins: Any = ROWS, outs: Any = ROWS, **options: Any) -> Any:
    return spmd.shard_map(body, mesh, ins, outs, **options)


class Doubled(torch.autograd.Function):
    """Twice a tensor, with derivatives as given by `FACTOR`: 3, so that they are seen."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 3 * g

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return 3 * t


class OnesBackward(Doubled):
    """Its gradient is the same on all ranks, though its operand is not."""

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return torch.ones(g.shape, dtype=g.dtype)


class NoneBackward(Doubled):
    """It has no gradient."""

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> None:
        return None


class Summed(torch.autograd.Function):
    """The sum over the ranks, with a collective in each direction."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return collectives.psum(x, "x")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return collectives.psum(g, "x")


class SummedTangent(torch.autograd.Function):
    """The sum of two tensors, of which one may have no tangent."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, s: torch.Tensor | None, t: torch.Tensor | None) -> torch.Tensor:
        return s if t is None else t if s is None else s + t


class TanOfSum(torch.autograd.Function):
    """A function with a collective forward and saved values."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return collectives.psum(x, "x")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.cos() * g


def gradients(how: str, f: Body, x: torch.Tensor, mesh: spmd.Mesh = LINE, spec: P = ROWS) -> Any:
    """Value and gradient of the sum of the results, by a transform of torch.func or, `how="autograd"`, by autograd."""
    if how != "autograd":
        return call(how, grad_and_value(lambda x: f(x).sum()), mesh, (spec,), x)

    def backward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        value = f(x).sum()
        return torch.autograd.grad(value, x)[0], value.detach()

    return spmd.jit(backward, (spec,), mesh=mesh)(x)


EVERY = (*HOW, "autograd")


@pytest.mark.parametrize("how", EVERY)
def test_backward_of_a_function_of_its_own(how: str) -> None:
    x = arange(4)
    assert_same(gradients(how, mapped(Doubled.apply), x), (torch.full_like(x, 3), 2 * x.sum()))


@pytest.mark.parametrize("how", EVERY)
def test_backward_of_a_function_of_its_own_in_an_expression(how: str) -> None:
    x = arange(4)
    assert_same(gradients(how, mapped(lambda a: Doubled.apply(a) * a), x), (5 * x, (2 * x * x).sum()))


@pytest.mark.parametrize("how", EVERY)
def test_backward_of_a_function_of_its_own_in_a_loop(how: str) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        y = a
        for _ in range(2):
            y = Doubled.apply(y)
        return y * a

    x = arange(4)
    assert_same(gradients(how, mapped(body), x), (13 * x, (4 * x * x).sum()))


@pytest.mark.parametrize("how", HOW)
def test_jvp_of_a_function_of_its_own(how: str) -> None:
    f = mapped(lambda a: Doubled.apply(a) * a)
    x = arange(4)
    value, tangent = call(how, lambda x: jvp(f, (x,), (3 * x,)), LINE, (ROWS,), x)
    assert_same((value, tangent), (2 * x * x, 3 * 3 * x * x + 2 * x * 3 * x))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("moving", [(0,), (1,), (0, 1)], ids=str)
def test_jvp_of_some_operands_of_a_function_of_its_own(moving: tuple[int, ...], how: str) -> None:
    f = mapped(SummedTangent.apply)

    def derivative(a: torch.Tensor, b: torch.Tensor) -> Any:
        values = [(a, b)[number] for number in moving]
        at = lambda *given: f(*(given[moving.index(n)] if n in moving else v for n, v in enumerate((a, b))))  # noqa: E731
        return jvp(at, tuple(values), tuple(values))

    a, b = randn(4, 5), randn(4, 6)[:, :5]
    expected = sum((a, b)[number] for number in moving)
    assert_same(call(how, derivative, LINE, (ROWS, ROWS), a, b), (a + b, expected))


@pytest.mark.parametrize("how", EVERY)
def test_a_gradient_that_is_the_same_on_all_ranks(how: str) -> None:
    x = arange(4)
    f = mapped(lambda a: OnesBackward.apply(a) * a)
    assert_same(gradients(how, f, x), (1 + 2 * x, (2 * x * x).sum()))


@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
@pytest.mark.parametrize("how", EVERY)
def test_a_function_without_a_gradient(how: str, check: bool) -> None:
    x = arange(8)
    f = mapped(lambda a: NoneBackward.apply(a) + 0 * a, PAIR, ROWS, ROWS, check=check)
    assert_same(gradients(how, f, x, PAIR), (torch.zeros_like(x), 2 * x.sum()))


@pytest.mark.parametrize("how", EVERY)
def test_a_function_without_a_gradient_of_a_reduced_value(how: str) -> None:
    body = lambda a: NoneBackward.apply(collectives.pcast(a, "x", to="reduced"))  # noqa: E731
    f = mapped(lambda a: collectives.pcast(body(a) + 0 * a, "x"), PAIR, P(), ROWS)
    assert_same(gradients(how, f, arange(8), PAIR, P())[0], torch.zeros(8, dtype=torch.float64))


def rounds_of(function: Body, rounds: int) -> Body:
    def body(a: torch.Tensor) -> torch.Tensor:
        for _ in range(rounds):
            a = function(a)
        return a

    return body


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_a_backward_that_sums_what_is_summed_already(how: str, rounds: int) -> None:
    f = mapped(rounds_of(Summed.apply, rounds), LINE, ROWS, P())
    with pytest.raises(spmd.SpmdError, match=r"psum over 'x' in Summed.backward of a gradient .* invariant along it"):
        gradients(how, f, torch.ones(4))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("how", EVERY)
def test_a_backward_that_sums_what_varies(how: str, rounds: int) -> None:
    class VaryingSum(Summed):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return collectives.pcast(collectives.psum(x, "x"), "x")

    f = mapped(rounds_of(VaryingSum.apply, rounds))
    gradient, value = gradients(how, f, torch.ones(4))
    assert_same((gradient, value), (torch.full((4,), 4.0**rounds), torch.tensor(4 * 4.0**rounds)))


@pytest.mark.parametrize("how", EVERY)
def test_a_gradient_that_varies_for_an_operand_that_does_not(how: str) -> None:
    class Scaled(Doubled):
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * (1 + collectives.axis_index("x"))

    f = mapped(lambda a: Scaled.apply(a), LINE, P(), P())
    with pytest.raises(spmd.TraceError, match=r"varying"):
        gradients(how, f, arange(4), LINE, P())


# Recomputation. torch.func does not support the hooks of torch.utils.checkpoint, so these are gradients by autograd.


def recomputed(f: Body) -> Body:
    return lambda x: checkpoint(f, x, use_reentrant=False)


def rows(x: torch.Tensor) -> torch.Tensor:
    """A vector by the ranks of LINE."""
    return x.view(4, -1)


CHAINS: dict[str, tuple[Body, Body]] = {
    "elementwise": (lambda a: a.sin().sin(), lambda x: x.sin().sin()),
    "scalars": (lambda a: a.sum().sin()[None].sin(), lambda x: rows(x).sum(1).sin().sin()),
    "several uses": (
        lambda a: a.sum().exp() + a + a.exp(),
        lambda x: rows(x).sum(1, True).exp() + rows(x) + rows(x).exp(),
    ),
    "gathers": (
        lambda a: collectives.all_gather(a, "x") * collectives.all_gather(a, "x"),
        lambda x: (rows(x)[None] ** 2).expand(4, 4, -1),
    ),
    "sums": (lambda a: a * collectives.psum(a.sin(), "x"), lambda x: rows(x) * rows(x).sin().sum(0)),
    "indices": (lambda a: a.exp() + collectives.axis_index("x"), torch.exp),
}


@pytest.mark.parametrize("where", ["in the body", "around it"])
@pytest.mark.parametrize("name", CHAINS)
def test_recomputed_bodies(name: str, where: str) -> None:
    body, reference = CHAINS[name]
    f = mapped(recomputed(body)) if where == "in the body" else recomputed(mapped(body))
    x = randn(8)
    assert_same(gradients("autograd", f, x)[0], grad(lambda x: reference(x).sum())(x))


@pytest.mark.xfail(
    strict=True, raises=spmd.TraceError, reason="operands are not cast in what a backward pass of autograd computes"
)
def test_recomputed_functions_of_their_own() -> None:
    body = lambda a: checkpoint(TanOfSum.apply, collectives.pcast(a, "x"), use_reentrant=False) ** 2  # noqa: E731
    x = arange(4)
    assert_same(gradients("autograd", mapped(body, LINE, P(), P()), x, LINE, P())[0], 4 * x.cos() * 2 * (4 * x))


def test_recomputed_products_over_axes_of_size_1() -> None:
    one = spmd.make_mesh({"x": 1, "y": 1}, runtime="virtual")
    body = spmd.shard_map(lambda a, b: torch.einsum("ij,kjl->ikl", a, b), one, (P("y"), P("x")), P("x", "y"))
    x, y = randn(3, 2), randn(3, 2, 1)
    given = gradients("autograd", lambda x: checkpoint(body, x, y, use_reentrant=False), x, one, P())[0]
    assert_same(given, y.sum((0, 2)).expand(3, 2))


@pytest.mark.parametrize("spec", [P("y"), P()], ids=str)
def test_recomputed_bodies_with_a_batch(spec: P) -> None:
    f = spmd.shard_map(torch.sin, WIDE, spec, spec)
    x = randn(4, 16)
    given = gradients("autograd", lambda x: checkpoint(vmap(f), x, use_reentrant=False), x, WIDE, P(None, *spec.dims))
    assert_same(given[0], x.cos())


@pytest.mark.parametrize("how", HOW)
def test_the_planner_recomputes_bodies_without_being_told(how: str) -> None:
    f = spmd.shard_map(lambda a: collectives.psum(a.sin().sin(), "y"), GRID, P("x", "y"), P("x"))
    x = randn(4, 4)
    expected = grad(lambda x: x.sin().sin().view(4, 2, 2).sum(1).exp().sum())(x)
    assert_same(call(how, grad(lambda x: f(x).exp().sum()), GRID, (P("x", "y"),), x), expected)
