"""Nested `shard_map`s and bodies that are manual over some axes only, where JAX has tests of its own `shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from manual_cases import (
    CUBE,
    GRID,
    HOW,
    WIDE,
    arange,
    assert_same,
    call,
    held,
    randn,
    spec_of,
    varying,
)
from torch.func import grad, vmap

import spmd
from spmd import P, collectives
from spmd.collectives.environment import bound_axes

BOTH, ROWS, COLUMNS = P("x", "y"), P("x"), P(None, "y")


def over(body: Callable[..., Any], axes: str, ins: Any, outs: Any, mesh: spmd.Mesh = GRID, **options: Any) -> Any:
    """A body that is manual over some axes of a mesh."""
    return spmd.shard_map(body, mesh, ins, outs, axis_names=tuple(axes), **options)


def square_rows(a: torch.Tensor) -> torch.Tensor:
    assert ("x",) == tuple(bound_axes())
    assert varying("x") == held(a) == held(a * a)
    return a * a


@pytest.mark.parametrize("given", [BOTH, P("x"), P("y"), P(("x", "y")), P()], ids=str)
def test_operands_of_any_spec_along_automatic_axes(given: P) -> None:
    x = arange(4, 8)
    assert_same(spmd.jit(over(square_rows, "x", ROWS, ROWS), (given,), mesh=GRID)(x), x * x)


def test_the_planner_keeps_the_automatic_axes_of_a_body() -> None:
    x = arange(4, 8)
    for function in (square_rows, lambda a: spmd.constrain(a, COLUMNS) ** 2):
        program = spmd.jit(over(function, "x", ROWS, ROWS), (BOTH,), BOTH, mesh=GRID)
        assert_same(program(x), x * x)
        assert () == program.plan(x).comms


@pytest.mark.parametrize("axes, spec", [("x", P("x")), ("y", P(None, "y"))])
def test_the_shape_in_a_body_is_global_along_automatic_axes(axes: str, spec: P) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        assert ((4, 2) if axes == "x" else (8, 1)) == tuple(a.shape)
        return a * 2

    x = arange(8, 2)
    program = spmd.jit(over(body, axes, spec, spec), (BOTH,), mesh=GRID)
    y = program(x)
    assert_same(y, x * 2)
    assert BOTH == spec_of(y)


@pytest.mark.parametrize("given", [BOTH, P(("x", "y")), P("x"), P("x", partial={"y": "sum"})], ids=str)
def test_automatic_axes_of_a_dtensor_outside_of_jit(given: P) -> None:
    x = arange(8, 2)
    y = over(lambda a: a * 2, "x", ROWS, ROWS)(spmd.distribute(x, given, GRID))
    assert_same(y, x * 2)
    assert given == spec_of(y) or given.partial


def test_manual_axes_of_a_dtensor_outside_of_jit() -> None:
    x = arange(8, 2)
    f = over(lambda a: a * 2, "y", P(None, "y"), P(None, "y"))
    assert BOTH == spec_of(f(spmd.distribute(x, BOTH, GRID)))
    assert_same(grad(lambda x: (f(x) ** 2).sum())(spmd.distribute(x, BOTH, GRID)), 8 * x)
    with pytest.raises(spmd.ShardingError, match=r"has spec P\('y', 'x'\) but in_specs says P\(None, 'y'\)"):
        f(spmd.distribute(x, P("y", "x"), GRID))


def test_one_dim_over_a_manual_and_an_automatic_axis() -> None:
    spec = P(("x", "y"))

    def body(a: torch.Tensor) -> torch.Tensor:
        assert (4, 2) == tuple(a.shape)
        return a * 2

    x = arange(8, 2)
    program = spmd.jit(over(body, "x", ROWS, ROWS), (spec,), spec, mesh=GRID)
    assert_same(program(x), x * 2)
    assert () == program.plan(x).comms
    total = over(lambda a: a.sum()[None], "x", ROWS, ROWS, WIDE)
    constrained = lambda x: spmd.constrain(total(spmd.constrain(x, spec)), ROWS)  # noqa: E731
    assert_same(spmd.jit(constrained, (P(),), mesh=WIDE)(arange(8)), arange(8).view(4, 2).sum(1))


def test_two_manual_and_two_automatic_axes() -> None:
    mesh = spmd.make_mesh({"i": 2, "j": 1, "k": 2, "l": 2}, runtime="virtual")

    def body(a: torch.Tensor) -> torch.Tensor:
        assert (2, 2, 2, 4) == tuple(a.shape)
        return a.permute(3, 2, 1, 0)

    x = arange(4, 2, 2, 4)
    f = spmd.shard_map(body, mesh, P("i", "j"), P("i", "j"), axis_names={"i", "j"})
    expected = torch.cat([half.permute(3, 2, 1, 0) for half in x.chunk(2)])
    assert_same(spmd.jit(f, (P("i", "j", "k", "l"),), mesh=mesh)(x), expected)


@pytest.mark.parametrize("order", [1, 2])
def test_gradients_through_a_partly_automatic_body(order: int) -> None:
    f = over(lambda a: a * a * a, "x", ROWS, ROWS)
    first = grad(lambda x: f(x).sum())
    function = first if order == 1 else grad(lambda x: (first(x) ** 2).sum())
    x = randn(4, 8)
    expected = 3 * x**2 if order == 1 else 36 * x**3
    assert_same(spmd.jit(function, (BOTH,), mesh=GRID)(x), expected)


@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
def test_whole_operands_of_a_body_over_two_axes_are_sharded_over_the_third(check: bool) -> None:
    f = over(lambda a: spmd.constrain(a * a, P("x")), "yz", P(), P(), CUBE, check=check)
    x = arange(4, 8)
    program = spmd.jit(f, (P("x"),), P("x"), mesh=CUBE)
    assert_same(program(x), x * x)
    assert () == program.plan(x).comms


@pytest.mark.parametrize("shape", [{"x": 1, "y": 2, "z": 2}, {"x": 4, "y": 2}], ids=str)
def test_a_manual_axis_of_any_size(shape: dict[str, int]) -> None:
    mesh = spmd.make_mesh(shape, runtime="virtual")
    x = arange(4, 8)
    squares = over(lambda a: a * a, "x", ROWS, ROWS, mesh, check=False)
    assert_same(spmd.jit(squares, (BOTH,), mesh=mesh)(x), x * x)
    index = over(lambda: collectives.axis_index("x").reshape(1, 1), "x", (), ROWS, mesh, check=False)
    assert_same(index(), torch.arange(shape["x"])[:, None])
    assert_same(spmd.jit(index, (), ROWS, mesh=mesh)(), torch.arange(shape["x"])[:, None])


def test_a_jitted_function_without_arguments_in_a_body() -> None:
    zeros = spmd.jit(lambda: torch.zeros(()), (), P(), mesh=GRID)
    f = over(lambda: zeros().reshape(1), "x", (), ROWS, check=False)
    assert_same(spmd.jit(f, (), mesh=GRID)(), torch.zeros(2))


def test_collectives_over_manual_axes_of_values_sharded_over_automatic_ones() -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    turn = over(
        lambda a: collectives.ppermute(spmd.constrain(a, P("y")), "x", ring), "x", ROWS, ROWS, WIDE, check=False
    )
    assert_same(spmd.jit(turn, (P(),), mesh=WIDE)(arange(8)), arange(8).roll(2))
    x = arange(16, 8)
    exchange = lambda dim: over(  # noqa: E731
        lambda a: collectives.all_to_all(spmd.constrain(a, P(*(None,) * dim, "y")), "x", 1, 0, tiled=True),
        "x", ROWS, COLUMNS_OF_X, WIDE,
    )  # fmt: skip
    for dim in (0, 1):
        assert_same(spmd.jit(exchange(dim), (ROWS,), mesh=WIDE)(x), x)


COLUMNS_OF_X = P(None, "x")


def test_integers_pass_a_partly_automatic_body() -> None:
    keys = torch.arange(8, dtype=torch.int64)
    same = over(lambda k: k, "x", ROWS, ROWS, WIDE, check=False)
    assert_same(spmd.jit(same, (P(),), mesh=WIDE)(keys), keys)
    first = over(lambda k: k[0], "x", ROWS, ROWS, WIDE, check=False)
    assert_same(spmd.jit(first, (P(),), mesh=WIDE)(keys.view(4, 2)), keys)


@pytest.mark.parametrize("collective", ["psum", "psum_scatter"])
def test_summands_enter_and_leave_a_partly_automatic_body(collective: str) -> None:
    summands = P(partial={"x": "sum"})
    reduce = (lambda a: collectives.psum(a, "x"), P()) if collective == "psum" else (scatter_rows, ROWS)
    total = over(reduce[0], "x", summands, reduce[1])
    product = over(lambda a, b: collectives.pcast(a @ b, "x", to="unreduced"), "x", (P(None, "x"), ROWS), summands)
    f = lambda a, b: total(product(a, b).mul(2))  # noqa: E731
    a, b = randn(4, 8), randn(8, 6)
    specs = (P("y", "x"), P("x", "y"))
    assert_same(spmd.jit(f, specs, mesh=GRID)(a, b), 2 * a @ b)
    loss = lambda g: lambda a, b: (g(a, b) ** 2).sum()  # noqa: E731
    expected = grad(loss(lambda a, b: 2 * a @ b), (0, 1))(a, b)
    assert_same(spmd.jit(grad(loss(f), (0, 1)), specs, mesh=GRID)(a, b), expected)


def scatter_rows(a: torch.Tensor) -> torch.Tensor:
    return collectives.psum_scatter(a, "x", tiled=True)


# Nested bodies.


def nested(inner: Callable[..., Any], ins: P = COLUMNS, outs: P = COLUMNS, **options: Any) -> Any:
    """A body over x, and in it one over the axes that are not manual yet."""
    body = lambda a: spmd.shard_map(inner, GRID, ins, outs, **options)(a)  # noqa: E731
    return over(body, "x", ROWS, ROWS)


@pytest.mark.parametrize("options", [{}, {"axis_names": "y"}], ids=["the rest", "named"])
@pytest.mark.parametrize("how", ["inside", "plain"])
def test_a_body_in_a_body(how: str, options: dict[str, str]) -> None:
    def inner(a: torch.Tensor) -> torch.Tensor:
        assert ("x", "y") == tuple(bound_axes())
        assert ((2, 4), varying("x", "y")) == (tuple(a.shape), held(a))
        return a * a

    f, x = nested(inner, **options), arange(4, 8)
    assert_same(spmd.jit(f, (BOTH,), mesh=GRID)(x) if how == "inside" else f(x), x * x)


@pytest.mark.parametrize("outer", [None, "x"])
@pytest.mark.parametrize("inner", [None, "y"])
def test_types_in_nested_bodies(outer: str | None, inner: str | None) -> None:
    def inside(a: torch.Tensor) -> torch.Tensor:
        assert ("x", "y") == tuple(bound_axes())
        assert varying(*filter(None, (outer, inner))) == held(a) == held(a * a)
        return a * a

    def outside(a: torch.Tensor) -> torch.Tensor:
        assert ("x",) == tuple(bound_axes())
        result = over(inside, "y", P(None, inner), P(None, inner), CUBE)(a)
        assert varying(*filter(None, (outer,))) == held(a) == held(result)
        return result

    x = arange(4, 8)
    f = over(outside, "x", P(outer), P(outer), CUBE)
    assert_same(spmd.jit(f, (P(outer, inner),), mesh=CUBE)(x), x * x)


def test_three_nested_bodies_the_innermost_over_the_rest() -> None:
    def innermost(a: torch.Tensor) -> torch.Tensor:
        assert ("x", "y", "z") == tuple(sorted(bound_axes()))
        return a * 2

    def middle(a: torch.Tensor) -> torch.Tensor:
        return spmd.shard_map(innermost, CUBE, P(), P())(a)

    f = over(lambda a: over(middle, "y", P(), P(), CUBE)(a), "x", P(), P(), CUBE)
    assert_same(spmd.jit(f, (P(),), mesh=CUBE)(torch.ones(4)), torch.full((4,), 2.0))


@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("how", ["inside", "plain"])
def test_gradients_of_nested_bodies(how: str, power: int) -> None:
    f = nested(lambda a: a**power)
    x = arange(4, 8)
    program = spmd.jit(grad(lambda x: f(x).sum()), (BOTH,), mesh=GRID)
    given = program(x) if how == "inside" else grad(lambda x: f(x).sum())(spmd.distribute(x, ROWS, GRID))
    assert_same(given, power * x ** (power - 1))


def test_a_sum_in_a_nested_body() -> None:
    def inner(a: torch.Tensor) -> torch.Tensor:
        assert varying("x", "y") == held(a)
        total = collectives.psum(a, "y")
        assert varying("x") == held(total)
        return total

    def outer(a: torch.Tensor) -> torch.Tensor:
        total = over(inner, "y", P("y"), P())(a.sin())
        assert varying("x") == held(total)
        return total

    f, x = over(outer, "x", ROWS, ROWS), arange(8)
    expected = x.sin().view(2, 2, 2).sum(1).flatten()
    assert_same(f(x), expected)
    assert_same(spmd.jit(f, (ROWS,), mesh=GRID)(x), expected)


@pytest.mark.parametrize("ins", [P(None, "y"), P()], ids=["sharded", "whole"])
def test_a_nested_body_over_an_axis_that_its_operand_is_not_sharded_over(ins: P) -> None:
    def inner(a: torch.Tensor) -> torch.Tensor:
        assert varying("x", *(["y"] if ins.dims else [])) == held(a)
        return a.sin()

    x = arange(8, 2)
    expected = (2 * x).sin() if ins.dims else (2 * x).sin().repeat(1, 2)
    f = over(lambda a: over(inner, "y", ins, COLUMNS)(a * 2), "x", ROWS, ROWS)
    assert_same(f(x), expected)
    assert_same(spmd.jit(f, (ROWS,), mesh=GRID)(x), expected)


@pytest.mark.parametrize("how", HOW)
def test_one_body_over_one_axis_with_whole_and_sharded_operands(how: str) -> None:
    f = over(lambda a, b: (a * 2, b * 2, a[:2] + b), "x", (P(), ROWS), (P(), ROWS, ROWS))
    x, y = arange(4), arange(4) + 1
    assert_same(call(how, f, GRID, (P(), ROWS), x, y), (x * 2, y * 2, x[:2].repeat(2) + y))


# Batches over the automatic axes.


def test_the_batch_dim_stays_on_an_automatic_axis() -> None:
    x = arange(4, 4)
    for body, expected in ((lambda a: a, x), (lambda a: collectives.psum(a, "y"), x.view(4, 2, 2).sum(1))):
        outs = P("y") if expected is x else P()
        f = vmap(over(body, "y", P("y"), outs))
        program = spmd.jit(f, (BOTH,), BOTH if expected is x else ROWS, mesh=GRID)
        assert_same(program(x), expected)
        assert (0 if expected is x else 1) == len(program.plan(x).comms)


def test_the_batch_dim_stays_on_two_automatic_axes() -> None:
    mesh = spmd.make_mesh({"z": 1, "x": 2, "y": 2}, runtime="virtual")
    spec = P(("z", "x"), "y")
    program = spmd.jit(vmap(over(lambda a: a.sin(), "y", P("y"), P("y"), mesh)), (spec,), spec, mesh=mesh)
    assert_same(program(arange(4, 4)), arange(4, 4).sin())
    assert () == program.plan(arange(4, 4)).comms


@pytest.mark.parametrize("axes", ["y", "xy"])
def test_gradients_row_by_row_on_an_automatic_axis(axes: str) -> None:
    def loss(row: torch.Tensor) -> torch.Tensor:
        return over(torch.cos, axes, P("y"), P("y"))(spmd.reshard(row, P("y"))).sum()

    x = randn(6, 24)
    assert_same(spmd.jit(vmap(grad(loss)), (ROWS,), mesh=GRID)(x), -x.sin())


def test_a_batch_of_sums_with_one_operand_shared() -> None:
    f = over(lambda a, b: a + collectives.all_gather(b, "x", tiled=True, to="invariant"), "x", (P(), ROWS), P())
    x, y = arange(4, 8), arange(8)
    assert_same(spmd.jit(vmap(f, (0, None)), (P(), ROWS), mesh=GRID)(x, y), x + y)


def test_a_batch_in_a_batch_with_a_captured_value() -> None:
    def rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return over(vmap(lambda item: x + item), "y", P("y"), P("y"))(y)

    x, y = arange(2), arange(2, 2)
    assert_same(spmd.jit(vmap(rows), (P(), P()), mesh=GRID)(x, y), x[:, None] + y)
