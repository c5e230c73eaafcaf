"""Types of per-rank values along mesh axes, where JAX has tests of its own `shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from manual_cases import (
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
    whole,
)
from torch.func import grad

import spmd
from spmd import P, collectives

REDUCED, UNREDUCED = {"x": "reduced"}, {"x": "unreduced"}
SUMMANDS = P(partial={"x": "sum"})
ROWS = P("x")


def to_reduced(a: torch.Tensor) -> torch.Tensor:
    return collectives.pcast(a, "x", to="reduced")


@pytest.mark.parametrize("how", HOW)
def test_pcast_to_varying(how: str) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        assert {} == held(a)
        cast = collectives.pcast(a, "x")
        assert varying("x") == held(cast)
        return cast

    f = spmd.shard_map(body, LINE, P(), ROWS)
    x, weights = arange(8), randn(32)
    assert_same(call(how, f, LINE, (P(),), x), x.repeat(4))
    gradient = call(how, grad(lambda x, w: (f(x) * w).sum()), LINE, (P(), ROWS), x, weights)
    assert_same(gradient, weights.view(4, 8).sum(0))


def test_an_operator_of_invariant_and_varying_values_varies() -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert ({}, varying("x")) == (held(a), held(b))
        assert varying("x") == held(a * b) == held(b * 2)
        assert {} == held(a * 2)
        return a * b

    f = spmd.shard_map(body, LINE, (P(), ROWS), ROWS)
    assert_same(f(torch.full((1,), 3.0), torch.arange(4.0)), 3 * torch.arange(4.0))
    gradient = grad(lambda a, b: f(a, b).sum())
    assert_same(
        call("outside", gradient, LINE, (P(), ROWS), torch.full((1,), 3.0), torch.arange(4.0)), torch.tensor([6.0])
    )


def test_an_axis_of_size_1_may_be_cast_to() -> None:
    one = spmd.make_mesh({"x": 1}, runtime="virtual")
    program = spmd.jit(spmd.shard_map(lambda a: collectives.pcast(a, "x"), one, P(), ROWS), (P(),), mesh=one)
    assert_same(program(arange(8)), arange(8))
    assert () == program.plan(arange(8)).comms


def rotated(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, rounds: int) -> list[torch.Tensor]:
    """Carries of a loop that change places."""
    for _ in range(rounds):
        x, y, z = z, x, y
    return [x, y, z]


INS = (P(), P("x"), P(("x", "y")))


def test_carries_that_change_places_keep_their_own_types() -> None:
    def body(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        carries = rotated(*(leaf.sum() for leaf in (x, y, z)), rounds=1)
        assert [varying("x", "y"), {}, varying("x")] == [held(leaf) for leaf in carries]
        return [leaf[None] for leaf in carries]

    x = arange(4)
    total = spmd.shard_map(body, GRID, INS, [P(("x", "y")), P(), P("x")])(x, x, x)
    assert_same(total, [x, x.sum(0, True), x.view(2, 2).sum(1)])


def test_carries_may_be_cast_to_one_type() -> None:
    def body(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        x, y, z = (leaf.sum() for leaf in (x, y, z))
        x, y = collectives.pcast(x, ("x", "y")), collectives.pcast(y, "y")
        carries = rotated(x, y, z, rounds=3)
        assert [varying("x", "y")] * 3 == [held(leaf) for leaf in carries]
        return [leaf[None] for leaf in carries]

    x = arange(4)
    expected = [x.sum().repeat(4), x.view(2, 2).sum(1).repeat_interleave(2), x]
    assert_same(spmd.shard_map(body, GRID, INS, P(("x", "y")))(x, x, x), expected)


@pytest.mark.parametrize("outs", [P("x"), P("y"), P()], ids=str)
def test_carries_that_vary_do_not_leave_as_invariant(outs: P) -> None:
    body = lambda x, y, z: [leaf.sum()[None] for leaf in rotated(x, y, z, rounds=3)]  # noqa: E731
    with pytest.raises(spmd.ShardingError, match=r"out_specs of result \d .* it is varying since"):
        spmd.shard_map(body, GRID, INS, outs)(arange(4), arange(4), arange(4))


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_a_loop_until_a_count(rounds: int) -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        step = 0
        while step < rounds:
            x, y, step = y, x + y, step + 1
        return y

    def expected(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(rounds):
            x, y = y, x + y
        return y

    x, y = arange(4), arange(2)
    assert_same(spmd.shard_map(body, PAIR, (ROWS, P()), ROWS)(x, y), expected(x, y.repeat(2)))


def test_where_takes_the_types_of_all_its_operands() -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = torch.where((x > 0).any(), x, x + 1)
        by_other = torch.where((y > 0).any(), x, x + 1)
        assert varying("x") == held(chosen)
        assert varying("x", "y") == held(by_other) == held(torch.where((x > 0).any(), x, y))
        return chosen, by_other

    x = torch.arange(4.0)
    chosen, both = spmd.shard_map(body, GRID, (P("x"), P("y")), (P("x"), P(("x", "y"))))(x, x)
    assert_same(chosen, x)
    assert_same(both, torch.tensor([0.0, 1, 0, 1, 2, 3, 2, 3]))
    with pytest.raises(spmd.ShardingError, match=r"invariant along 'y', and it is varying"):
        spmd.shard_map(lambda x, y: body(x, y)[1], GRID, (P("x"), P("y")), P("x"))(x, x)


def test_a_python_number_by_a_static_choice() -> None:
    choose = lambda n: lambda x, y: (x, x + 1, x + 2)[n]  # noqa: E731
    for number in range(3):
        f = spmd.shard_map(choose(number), GRID, (P("x"), P("y")), P("x"))
        assert_same(f(arange(4), arange(4)), arange(4) + number)


# Unreduced values.


@pytest.mark.parametrize("how", HOW)
def test_a_product_of_shards_is_unreduced(how: str) -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = a @ b
        assert varying("x", "y") == held(product)
        product = collectives.pcast(product, "y", to="unreduced")
        assert {"x": "varying", "y": "unreduced"} == held(product)
        return product

    specs, out = (P("x", "y"), P("y")), P("x", partial={"y": "sum"})
    f = spmd.shard_map(body, GRID, specs, out)
    a, b = arange(2, 4), arange(4, 2)
    product = f(a, b)
    assert out == spec_of(product)
    shards = [[[2.0, 3]], [[26.0, 31]], [[10.0, 19]], [[66.0, 79]]]
    assert [torch.tensor(shard, dtype=torch.float64).tolist() for shard in shards] == [
        s.tolist() for s in product.shards
    ]
    assert_same(product, a @ b)
    loss = lambda g: lambda a, b: (g(a, b).sin()).sum()  # noqa: E731
    expected = grad(loss(torch.matmul), (0, 1))(a, b)
    assert_same(call(how, grad(loss(f), (0, 1)), GRID, specs, a, b), expected)


def test_a_product_that_is_unreduced_over_an_axis_beside_one_of_size_1() -> None:
    mesh = spmd.make_mesh({"x": 2, "y": 1}, runtime="virtual")
    f = spmd.shard_map(
        lambda a, b: collectives.pcast(a @ b, "x", to="unreduced"), mesh, (P(None, "x"), P("x")), SUMMANDS
    )
    product = f(torch.ones(8, 4), torch.ones(4, 6))
    assert SUMMANDS == spec_of(product)
    assert_same(product, torch.full((8, 6), 4.0))


def test_a_product_that_does_not_vary_is_not_unreduced() -> None:
    f = spmd.shard_map(torch.matmul, GRID, (P("x"), P()), P("x", partial={"y": "sum"}))
    with pytest.raises(
        spmd.ShardingError, match=r"unreduced along 'y', and it is invariant .* Leave 'y' out of 'partial'"
    ):
        f(arange(2, 4), arange(4, 2))


def test_a_value_is_unreduced_by_one_cast_only() -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return collectives.pcast(collectives.pcast(a @ b, "y", to="unreduced"), ("x", "y"), to="reduced")

    with pytest.raises(spmd.SpmdError, match=r"varying along 'x' cannot be cast to reduced"):
        spmd.shard_map(body, GRID, (P("x", "y"), P("y")), P("x"))(arange(4, 2), arange(2, 4))


@pytest.mark.parametrize("collective", ["psum", "psum_scatter"])
def test_an_unreduced_operand_is_reduced_in_the_body(collective: str) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        assert UNREDUCED == held(a)
        if collective == "psum":
            total = collectives.psum(a, "x")
            assert {} == held(total)
            return total
        part = collectives.psum_scatter(a, "x", tiled=True)
        assert varying("x") == held(part)
        return part

    f = spmd.shard_map(body, PAIR, SUMMANDS, P() if collective == "psum" else ROWS)
    loss = lambda g: lambda a, b: (g(a @ b) ** 2).sum()  # noqa: E731
    a, b = randn(2, 4), randn(4, 6)
    specs = (P(None, "x"), P("x"))
    expected = grad(loss(lambda z: z), (0, 1))(a, b)
    assert_same(call("inside", loss(f), PAIR, specs, a, b), loss(lambda z: z)(a, b))
    assert_same(call("inside", grad(loss(f), (0, 1)), PAIR, specs, a, b), expected)
    product = spmd.jit(torch.matmul, specs, SUMMANDS, mesh=PAIR)
    summands = lambda a, b: (f(product(a, b)) ** 2).sum()  # noqa: E731
    assert_same(call("outside", grad(summands, (0, 1)), PAIR, specs, a, b), expected)


def test_the_product_before_an_unreduced_operand_is_not_summed_twice() -> None:
    f = spmd.shard_map(lambda a: collectives.psum(a, "x"), PAIR, SUMMANDS, P())
    program = spmd.jit(lambda a, b: f(a @ b), (P(None, "x"), P("x")), mesh=PAIR)
    assert ["all_reduce"] == [comm.kind for comm in program.plan(randn(2, 4), randn(4, 6)).comms]


@pytest.mark.parametrize("name", ["sin", "exp", "relu", "square"])
def test_what_is_not_linear_refuses_summands(name: str) -> None:
    function = getattr(torch, name)
    with pytest.raises(spmd.TraceError, match=r"is not linear in .*unreduced along 'x'.* Call psum over 'x' first"):
        spmd.shard_map(function, PAIR, SUMMANDS, P())(arange(4, 2))
    made = lambda a: function(collectives.pcast(a, "x", to="unreduced"))  # noqa: E731
    with pytest.raises(spmd.TraceError, match=r"is not linear in .*since pcast at .* Call psum over 'x' first"):
        spmd.shard_map(made, PAIR, ROWS, SUMMANDS)(arange(8))


@pytest.mark.parametrize("how", HOW)
def test_a_varying_value_leaves_as_summands(how: str) -> None:
    f = spmd.shard_map(lambda a: collectives.pcast(a, "x", to="unreduced"), PAIR, ROWS, SUMMANDS)
    x, weights = arange(8), randn(4)
    y = f(x)
    assert ((4,), SUMMANDS) == (tuple(y.shape), spec_of(y))
    assert [[0.0, 1, 2, 3], [4.0, 5, 6, 7]] == [shard.tolist() for shard in y.shards]
    assert_same(y, x[:4] + x[4:])
    gradient = call(how, grad(lambda x, w: (f(x) * w).sum()), PAIR, (ROWS, P()), x, weights)
    assert_same(gradient, weights.repeat(2))


def test_summands_enter_again_and_are_summed() -> None:
    out = spmd.shard_map(lambda a: collectives.pcast(a, "x", to="unreduced"), PAIR, ROWS, SUMMANDS)(torch.arange(4))
    total = spmd.shard_map(lambda a: collectives.psum(a, "x"), PAIR, SUMMANDS, P())(out)
    assert_same(total, torch.tensor([2, 4]))
    assert [[2, 4]] * 2 == [shard.tolist() for shard in total.shards]


def test_a_product_of_summands_and_a_reduced_value() -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            total = (a * b).sum()
            assert UNREDUCED == held(total)
            return collectives.psum(total, "x")

        of_a, of_b = grad(loss, (0, 1))(a, to_reduced(b))
        assert (REDUCED, UNREDUCED) == (held(of_a), held(of_b))
        return collectives.pcast(of_a, "x"), of_b

    x, y = randn(8), arange(8)
    summands = spmd.distribute(x, SUMMANDS, PAIR)
    of_a, of_b = spmd.shard_map(body, PAIR, (SUMMANDS, P()), (ROWS, SUMMANDS))(summands, y)
    assert_same((of_a, of_b), (y.repeat(2), x))


# Reduced values. Globally a reduced value is that of an invariant one, so a body makes it by pcast, and its gradient
# in the body leaves as summands.


def summands_of(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The gradient in a body with respect to the first argument, made reduced: one summand of it on each rank."""

    def body(w: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        gradient = grad(loss)(to_reduced(w), *args)
        assert "unreduced" == held(gradient)["x"]
        return gradient

    return body


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda w, a: ((a + w) ** 2).sum(),
    "mul": lambda w, a: (a * w).sin().sum(),
    "mul and psum": lambda w, a: collectives.psum((a * w).sin(), "x").sum(),
    "sin": lambda w, a: (w.sin() * a).sum(),
    "reshape": lambda w, a: (w.reshape(4, 2) * a.reshape(4, 2)).sum(),
    "product": lambda w, a: (a.reshape(4, 2) @ w.reshape(2, 4)).sum(),
    "transpose": lambda w, a: (w.reshape(2, 4).T @ a.reshape(2, 4)).sum(),
    "to another dtype": lambda w, a: (w.float() * a.float()).double().sum(),
    "with a batch": lambda w, a: torch.vmap(lambda row: (row * w).sum())(a.expand(3, 8)).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_reduced_value_is_in_summands(name: str) -> None:
    loss = LOSSES[name]
    w, x = randn(8), randn(16) / 3
    found = spmd.shard_map(summands_of(loss), PAIR, (P(), ROWS), SUMMANDS)(w, x)
    assert SUMMANDS == spec_of(found)
    summed = lambda w: sum(loss(w, half) for half in x.chunk(2))  # noqa: E731
    if name == "mul and psum":
        summed = lambda w: 2 * sum((half * w).sin().sum() for half in x.chunk(2)) / 2  # noqa: E731
    torch.testing.assert_close(whole(found), grad(summed)(w), rtol=1e-5, atol=1e-5)
    invariant = spmd.shard_map(lambda w, a: grad(loss)(w, a), PAIR, (P(), ROWS), P())(w, x)
    torch.testing.assert_close(whole(found), whole(invariant), rtol=1e-5, atol=1e-5)


def test_a_reduced_value_acts_as_an_invariant_one() -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        reduced = to_reduced(b)
        assert REDUCED == held(reduced) == held(reduced * 2) == held(reduced.float()) == held(reduced.T)
        assert REDUCED == held(reduced * b) == held(reduced.reshape(-1))
        assert varying("x") == held(a @ reduced) == held(collectives.pcast(reduced, "x"))
        return a @ reduced

    a, b = arange(4, 2), arange(2, 6)
    assert_same(spmd.shard_map(body, PAIR, (ROWS, P()), ROWS)(a, b), a @ b)


@pytest.mark.parametrize("how", HOW)
def test_reduced_over_one_axis_and_summed_over_another(how: str) -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        reduced = to_reduced(b)
        assert {"x": "reduced", "y": "varying"} == held(reduced)
        product = a @ reduced
        assert varying("x", "y") == held(product)
        return collectives.psum(product, "y")

    specs = (P("x", "y"), P("y"))
    f = spmd.shard_map(body, GRID, specs, ROWS)
    a, b = randn(4, 2), randn(2, 6)
    assert_same(f(a, b), a @ b)
    loss = lambda g: lambda a, b: (g(a, b) ** 2).sum()  # noqa: E731
    gradients = call(how, grad(loss(f), (0, 1)), GRID, specs, a, b)
    assert_same(gradients, grad(loss(torch.matmul), (0, 1))(a, b))
    assert how == "inside" or specs == tuple(map(spec_of, gradients))


@pytest.mark.parametrize("how", HOW)
def test_all_gather_to_reduced_sums_its_gradient_by_psum_scatter(how: str) -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        gathered = collectives.all_gather(b, "x", tiled=True, to="reduced")
        assert REDUCED == held(gathered)
        return a @ gathered

    f = spmd.shard_map(body, PAIR, (ROWS, ROWS), ROWS)
    a, b = randn(4, 2), randn(2, 6)
    loss = lambda g: lambda a, b: (g(a, b) ** 2).sum()  # noqa: E731
    assert_same(call(how, f, PAIR, (ROWS, ROWS), a, b), a @ b)
    assert_same(call(how, grad(loss(f), (0, 1)), PAIR, (ROWS, ROWS), a, b), grad(loss(torch.matmul), (0, 1))(a, b))
    program = spmd.jit(grad(loss(f), (0, 1)), (ROWS, ROWS), (ROWS, ROWS), mesh=PAIR)
    assert ["reduce_scatter"] == [c.kind for c in program.plan(a, b).comms if c.source.backward]


@pytest.mark.parametrize("how", HOW)
def test_weights_sharded_over_one_axis_and_gradients_summed_over_another(how: str) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = collectives.pcast(w, "x", to="reduced")
        assert {"x": "reduced", "y": "varying"} == held(w)
        w = collectives.all_gather(w, "y", tiled=True, to="reduced")
        assert {"x": "reduced", "y": "reduced"} == held(w)
        return torch.einsum("btd,df->btf", x, w)

    specs = (P("x", "y"), P("y"))
    f = spmd.shard_map(body, GRID, specs, P("x", "y"))
    x, w = randn(8, 4, 2), randn(2, 6)
    loss = lambda g: lambda x, w: g(x, w).sum().sin()  # noqa: E731
    assert_same(call(how, grad(loss(f), (0, 1)), GRID, specs, x, w), grad(loss(torch.matmul), (0, 1))(x, w))
    program = spmd.jit(grad(loss(f), (0, 1)), specs, specs, mesh=GRID)
    kinds = [comm.kind for comm in program.plan(x, w).comms if comm.source.backward]
    assert {"reduce_scatter", "all_reduce"} <= set(kinds)


def test_the_same_by_a_function_with_its_own_backward() -> None:
    scatter = spmd.shard_map(
        lambda a: collectives.psum_scatter(a, "y", tiled=True),
        GRID,
        P(partial={"x": "sum", "y": "sum"}),
        P("y", partial={"x": "sum"}),
    )
    add = spmd.shard_map(lambda a: collectives.psum(a, "x"), GRID, P("y", partial={"x": "sum"}), P("y"))

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            gather = lambda a: collectives.all_gather(a, "y", tiled=True, to="invariant")  # noqa: E731
            return torch.einsum("btd,df->btf", x, spmd.shard_map(gather, GRID, P("y"), P())(w))

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            return torch.einsum("btf,df->btd", g, w), add(scatter(torch.einsum("btd,btf->df", x, g)))

    x, w = randn(8, 4, 2), randn(2, 6)
    specs = (P("x", "y"), P("y"))
    gradients = call("inside", grad(lambda x, w: Product.apply(x, w).sum().sin(), (0, 1)), GRID, specs, x, w)
    assert_same(gradients, grad(lambda x, w: (x @ w).sum().sin(), (0, 1))(x, w))


@pytest.mark.parametrize("how", HOW)
def test_a_loss_of_a_value_that_is_gathered_as_reduced(how: str) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        whole_rows = collectives.all_gather(a, "y", axis=1, tiled=True, to="reduced")
        total = collectives.psum(whole_rows.sin().sum(), "x")
        assert {"y": "reduced"} == held(total)
        return collectives.pcast(total, "y")[None]

    f = spmd.shard_map(body, GRID, P("x", "y"), P("y"))
    x = randn(8, 4)
    assert_same(call(how, grad(lambda x: f(x)[0]), GRID, (P("x", "y"),), x), x.cos())


def test_where_the_types_of_an_axis_are_those_of_its_ranks() -> None:
    names = ("varying", "invariant", "reduced", "unreduced")

    def body(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values = (a, b, to_reduced(b), collectives.pcast(a, "x", to="unreduced"))
        assert names == tuple(held(value).get("x", "invariant") for value in values)
        return a

    assert_same(spmd.shard_map(body, WIDE, (ROWS, P()), ROWS)(arange(8), arange(2)), arange(8))
