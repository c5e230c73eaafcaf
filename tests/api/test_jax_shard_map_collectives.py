"""Collectives of functions under `shard_map`, values and first gradients, where JAX has tests of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from manual_cases import (
    CUBE,
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
    whole,
)

import spmd
from spmd import P, collectives

COLUMNS = P("z", ("x", "y"))


def blocks(x: torch.Tensor) -> torch.Tensor:
    """A matrix by the ranks of CUBE under COLUMNS: dims z, row, x and y, column."""
    return x.reshape(2, x.shape[0] // 2, 4, x.shape[1] // 4)


def test_all_gather_of_one_axis_and_of_two() -> None:
    def body(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = collectives.all_gather(a, "z", axis=0, tiled=True)
        return rows, collectives.all_gather(a, ("x", "y"), axis=-1, tiled=True)

    x = arange(8, 8)
    rows, columns = spmd.shard_map(body, CUBE, COLUMNS, COLUMNS)(x)
    assert_same(rows, torch.cat([x, x]))
    assert_same(columns, x.repeat(1, 4))
    assert [(8, 2)] * 8 == [tuple(shard.shape) for shard in rows.shards]
    assert [(4, 8)] * 8 == [tuple(shard.shape) for shard in columns.shards]


@pytest.mark.parametrize("how", HOW)
def test_all_gather_to_invariant(how: str) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        gathered = collectives.all_gather(a, "x", tiled=True, to="invariant")
        assert {} == held(gathered)
        return gathered

    f = spmd.shard_map(body, LINE, P("x"), P())
    x, weights = arange(8), randn(8)
    assert_same(call(how, f, LINE, (P("x"),), x), x)
    loss = lambda a, w: (f(a).sin() * w).sum()  # noqa: E731
    gradient = call(how, torch.func.grad(loss), LINE, (P("x"), P()), x, weights)
    assert_same(gradient, x.cos() * weights)
    assert how == "inside" or P("x") == spec_of(gradient)
    hessian = call(how, torch.func.hessian(loss), LINE, (P("x"), P()), x, weights)
    assert_same(hessian, torch.diag(-x.sin() * weights))


@pytest.mark.parametrize("how", HOW)
def test_all_gather_to_invariant_over_some_axes(how: str) -> None:
    def body(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = collectives.all_gather(a, "z", axis=0, tiled=True, to="invariant")
        columns = collectives.all_gather(a, ("x", "y"), axis=-1, tiled=True, to="invariant")
        assert varying("x", "y") == held(rows)
        assert varying("z") == held(columns)
        return rows, columns

    f = spmd.shard_map(body, CUBE, COLUMNS, (P(None, ("x", "y")), P("z")))
    x = arange(8, 8)
    assert_same(call(how, f, CUBE, (COLUMNS,), x), (x, x))
    gradient = call(how, torch.func.grad(lambda a: (f(a)[0] ** 2).sum()), CUBE, (COLUMNS,), x)
    assert_same(gradient, 2 * x)


def test_all_gather_of_an_invariant_value_casts_it() -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        assert {} == held(a)
        gathered = collectives.all_gather(a, "x")
        assert varying("x") == held(gathered)
        return gathered

    x = arange(8)
    assert_same(spmd.shard_map(body, PAIR, P(), P("x"))(x), x.expand(4, 8))


def test_psum_scatter_of_a_product() -> None:
    def body(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        product = a @ b
        assert varying("y", "z") == held(product)
        one = collectives.psum_scatter(product, "y", scatter_dimension=0, tiled=True)
        return one, collectives.psum_scatter(product, ("z", "y"), scatter_dimension=0, tiled=True)

    a, b = arange(8, 8), arange(8, 8) / 8
    one, both = spmd.shard_map(body, CUBE, (P("z", "y"), P("y")), P(("z", "y")))(a, b)
    assert_same(one, a @ b)
    assert_same(both, (a @ b)[:4] + (a @ b)[4:])
    assert [(2, 8)] * 8 == [tuple(shard.shape) for shard in one.shards]


@pytest.mark.parametrize(
    "axes, spec, axis, dim, shape",
    [
        ({"x": 2, "y": 2}, P("x", "y"), "x", 0, (4, 2)),
        ({"r": 1, "d": 1, "s": 2, "m": 1}, P(None, "s"), "s", 1, (1, 4, 8)),
        ({"r": 1, "d": 1, "s": 2, "m": 1}, P(("r", "d"), "s"), "s", 1, (1, 4, 8)),
    ],
    ids=["grid", "axes of size 1", "shards over axes of size 1"],
)
def test_psum_scatter_on_meshes(axes: dict[str, int], spec: P, axis: str, dim: int, shape: tuple[int, ...]) -> None:
    body = lambda a: collectives.psum_scatter(a, axis, scatter_dimension=dim, tiled=True)  # noqa: E731
    x = arange(*shape)
    summed = x.unflatten(dim, (2, -1)).sum(dim)
    assert_same(spmd.shard_map(body, spmd.make_mesh(axes, runtime="virtual"), spec, spec)(x), summed)


@pytest.mark.parametrize("mesh", [PAIR, LINE, EIGHT], ids=["2", "4", "8"])
def test_ppermute_turns_a_ring(mesh: spmd.Mesh) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        size = collectives.axis_size("x")
        return collectives.ppermute(a, "x", [(rank, (rank + 1) % size) for rank in range(size)])

    x = arange(8, 8)
    assert_same(spmd.shard_map(body, mesh, P("x"), P("x"))(x), x.roll(8 // mesh.size, 0))


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "z"), ("y", "x"), ("z", "x")], ids="-".join)
def test_ppermute_over_two_axes(axes: tuple[str, str]) -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    f = spmd.shard_map(lambda a: collectives.ppermute(a, axes, ring), CUBE, P(("x", "y", "z")), P(("x", "y", "z")))
    order = ["xyz".index(axis) for axis in axes] + ["xyz".index(axis) for axis in "xyz" if axis not in axes]
    x = arange(8)
    ranks = x.reshape(2, 2, 2).permute(order).reshape(4, 2).roll(1, 0).reshape(2, 2, 2)
    back = [order.index(dim) for dim in range(3)]
    assert_same(f(x), ranks.permute(back).flatten())


def test_ppermute_over_axes_in_the_order_of_the_spec() -> None:
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    spec = P(("y", "x"))
    f = spmd.shard_map(lambda a: collectives.ppermute(a, ("y", "x"), ring), GRID, spec, spec)
    assert_same(f(arange(4)), arange(4).roll(1))


def test_ppermute_takes_any_iterable_of_pairs() -> None:
    f = spmd.shard_map(lambda a: collectives.ppermute(a, "x", zip([0, 1], [1, 0], strict=True)), PAIR, P("x"), P("x"))
    assert_same(f(arange(8)), arange(8).roll(4))


@pytest.mark.parametrize("mesh, axes", [(EIGHT, "x"), (WIDE, ("x", "y")), (WIDE, ("y", "x"))], ids=["one", "xy", "yx"])
def test_all_to_all_in_place_of_the_split_dim(mesh: spmd.Mesh, axes: str | Sequence[str]) -> None:
    body = lambda a: collectives.all_to_all(a, axes, 1, 1, tiled=True)  # noqa: E731
    x = arange(8, 8)
    assert_same(spmd.shard_map(body, mesh, P(axes), P(None, axes))(x), x.T.reshape(1, 64))


@pytest.mark.parametrize("dims", [(1, 0), (0, 1)], ids=["rows to columns", "columns to rows"])
@pytest.mark.parametrize("how", HOW)
def test_all_to_all_reshards_and_its_gradient_reshards_back(how: str, dims: tuple[int, int]) -> None:
    split, joined = dims
    before, after = P(*(None,) * joined, "x"), P(*(None,) * split, "x")
    f = spmd.shard_map(lambda a: collectives.all_to_all(a, "x", split, joined, tiled=True), LINE, before, after)
    x = arange(8, 8) / 9
    y = call(how, f, LINE, (before,), x)
    assert_same(y, x)
    assert how == "inside" or after == spec_of(y)
    value, gradient = call(
        how, lambda a: torch.func.grad_and_value(lambda a: 2 * f(a).sin().sum())(a), LINE, (before,), x
    )[::-1]
    assert_same((value, gradient), (2 * x.sin().sum(), 2 * x.cos()))


def test_all_to_all_without_tiles() -> None:
    f = spmd.shard_map(lambda a: collectives.all_to_all(a, "x", 1, 0), PAIR, P("x"), P(None, "x"))
    x = arange(4, 2)
    pieces = x.reshape(2, 2, 2)  # sender, row, receiver
    assert_same(f(x), pieces.permute(0, 2, 1).reshape(2, 4))


@pytest.mark.parametrize("name, expected", [("pmin", [0.0, 1.0]), ("pmax", [6.0, 7.0])])
def test_extrema(name: str, expected: list[float]) -> None:
    f = spmd.shard_map(lambda a: getattr(collectives, name)(a, "x"), LINE, P("x"), P())
    assert_same(f(arange(8)), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", ["pmin", "pmax"])
def test_an_extremum_of_an_invariant_value_casts_it(name: str) -> None:
    f = spmd.shard_map(lambda a: getattr(collectives, name)(a, "x"), LINE, P(), P())
    assert_same(f(arange(8)), arange(8))
    loss = lambda a: (f(a) ** 2).sum()  # noqa: E731
    assert_same(torch.func.grad(loss)(spmd.distribute(arange(8), P(), LINE)), 2 * arange(8))


@pytest.mark.parametrize("axes", [("y",), ("x",), ("x", "y")], ids="-".join)
@pytest.mark.parametrize("how", HOW)
def test_psum_makes_invariant_what_it_sums(axes: tuple[str, ...], how: str) -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        total = collectives.psum(a, axes)
        assert varying(*(axis for axis in ("x", "y") if axis not in axes)) == held(total)
        return total

    spec = P(*(axis if axis not in axes else None for axis in ("x", "y")))
    x = randn(8, 8)
    expected = x
    for dim, axis in enumerate(("x", "y")):
        if axis in axes:
            expected = expected.unflatten(dim, (2, 4)).sum(dim)
    assert_same(call(how, spmd.shard_map(body, GRID, P("x", "y"), spec), GRID, (P("x", "y"),), x), expected)


def test_psum_over_one_axis_leaves_the_other_varying() -> None:
    f = spmd.shard_map(lambda a: collectives.psum(a, "x"), GRID, P("x", "y"), P("x", "y"))
    assert_same(f(torch.ones(2, 2)), torch.full((2, 2), 2.0))


def test_psum_of_a_sum_multiplies_by_the_number_of_ranks() -> None:
    f = spmd.shard_map(lambda a: collectives.psum(collectives.psum(a, "x"), "x"), LINE, P("x"), P())
    assert_same(f(arange(4)), 4 * arange(4).sum(0, keepdim=True))


@pytest.mark.parametrize("how", HOW)
def test_a_psum_that_no_loss_uses(how: str) -> None:
    f = spmd.shard_map(lambda a: (a, collectives.psum(a, "x")), EIGHT, P("x"), (P("x"), P()))
    x = arange(16)
    assert_same(f(x), (x, x.view(8, 2).sum(0)))
    assert_same(call(how, torch.func.grad(lambda a: f(a)[0].sum()), EIGHT, (P("x"),), x), torch.ones_like(x))


def test_a_value_of_one_rank_is_sent_to_all() -> None:
    def body(a: torch.Tensor) -> torch.Tensor:
        index = collectives.axis_index("x")
        changed = torch.where(index == 0, a + 1, a - index)
        return collectives.psum(torch.where(index == 0, changed, 0), "x")

    x = arange(4, 4)
    assert_same(spmd.shard_map(body, WIDE, P("y"), P("y"))(x), x + 1)
    f = spmd.shard_map(body, WIDE, P("y"), P("y"))
    gradient = torch.func.grad(lambda a: (f(a) ** 2).sum())(spmd.distribute(x, P("y"), WIDE))
    assert_same(gradient, 2 * (x + 1))


@pytest.mark.parametrize("groups", [[(0, 1), (2, 3)], [(0, 2), (1, 3)]], ids=["neighbours", "strided"])
def test_groups_of_ranks_are_axes_of_the_mesh(groups: list[tuple[int, int]]) -> None:
    axis = "y" if groups == [(0, 1), (2, 3)] else "x"
    spec = P(("x", "y"))
    gather = spmd.shard_map(lambda a: collectives.all_gather(a, axis, tiled=True), GRID, spec, spec)
    scatter = spmd.shard_map(lambda a: collectives.psum_scatter(a, axis, tiled=True), GRID, spec, spec)
    x, ranks = arange(8), arange(8).view(4, 2)
    member = {rank: group for group in groups for rank in group}
    assert_same(gather(x), torch.cat([ranks[list(member[rank])].flatten() for rank in range(4)]))
    sums = [ranks[list(member[rank])].sum(0)[member[rank].index(rank)] for rank in range(4)]
    assert_same(scatter(x), torch.stack(sums))


RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
OPEN = [(0, 2), (2, 3)]
LINEAR: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], P, Callable[[torch.Tensor], torch.Tensor]]] = {
    "ppermute": (lambda a: collectives.ppermute(a, "x", RING), P("x"), lambda x: x.roll(4)),
    "ppermute of some": (
        lambda a: collectives.ppermute(a, "x", OPEN),
        P("x"),
        lambda x: torch.cat([x.new_zeros(8), x[:4], x[8:12]]),
    ),
    "all_gather": (lambda a: collectives.all_gather(a, "x", tiled=True), P("x"), lambda x: x.repeat(4)),
    "all_gather to invariant": (lambda a: collectives.all_gather(a, "x", tiled=True, to="invariant"), P(), lambda x: x),
    "all_gather to reduced": (
        lambda a: collectives.pcast(collectives.all_gather(a, "x", tiled=True, to="reduced"), "x"),
        P("x"),
        lambda x: x.repeat(4),
    ),
    "psum": (lambda a: collectives.psum(a, "x"), P(), lambda x: x.view(4, 4).sum(0)),
    "psum of summands": (
        lambda a: collectives.psum(collectives.pcast(a, "x", to="unreduced"), "x"),
        P(),
        lambda x: x.view(4, 4).sum(0),
    ),
    "psum_scatter": (lambda a: collectives.psum_scatter(a, "x", tiled=True), P("x"), lambda x: x.view(4, 4).sum(0)),
    "psum_scatter of summands": (
        lambda a: collectives.psum_scatter(collectives.pcast(a, "x", to="unreduced"), "x", tiled=True),
        P("x"),
        lambda x: x.view(4, 4).sum(0),
    ),
    "all_to_all": (
        lambda a: collectives.all_to_all(a, "x", 0, 0, tiled=True),
        P("x"),
        lambda x: x.view(4, 4).T.flatten(),
    ),
    "pmean": (lambda a: collectives.pmean(a, "x"), P(), lambda x: x.view(4, 4).mean(0)),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_of_gradients(name: str, how: str) -> None:
    body, outs, reference = LINEAR[name]
    f = spmd.shard_map(lambda a: body(a.sin()), LINE, P("x"), outs)
    x, t = randn(16), arange(16) / 7
    weights = arange(*reference(x).shape) / 5 - 1
    loss = lambda g: lambda x: (g(x).exp() * weights).sum()  # noqa: E731
    if how == "outside":
        placed = spmd.distribute(weights, outs, LINE)
        mine = lambda x: (f(x).exp() * placed).sum()  # noqa: E731
    else:
        mine = loss(f)
    slope = lambda g: lambda x, t: (torch.func.grad(g)(x) * t).sum()  # noqa: E731
    expected = [torch.func.grad(slope(loss(lambda x: reference(x.sin()))))(x, t)]
    assert_same([call(how, torch.func.grad(slope(mine)), LINE, (P("x"), P("x")), x, t)], expected)
    assert_same(
        call(how, torch.func.grad(mine), LINE, (P("x"),), x), torch.func.grad(loss(lambda x: reference(x.sin())))(x)
    )


REFUSING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_gather": lambda a: collectives.all_gather(a, "x", axis_index_groups=((0, 1), (2, 3)), tiled=True),
    "psum_scatter": lambda a: collectives.psum_scatter(a, "x", axis_index_groups=((0, 2), (1, 3)), tiled=True),
    "all_to_all": lambda a: collectives.all_to_all(a, "x", 0, 0, axis_index_groups=((0, 1), (2, 3)), tiled=True),
    "psum": lambda a: collectives.psum(a, "x", axis_index_groups=((0, 1), (2, 3))),
}


@pytest.mark.parametrize("name", REFUSING)
def test_groups_by_number_are_refused(name: str) -> None:
    with pytest.raises(spmd.SpmdError, match=r"axis_index_groups is not supported .* Split the axis into two"):
        spmd.shard_map(REFUSING[name], LINE, P("x"), P("x"))(arange(16))


def test_collectives_of_a_plan_are_those_of_the_body() -> None:
    body = lambda a: collectives.psum(collectives.ppermute(a, "x", [(0, 1), (1, 0)]).sin(), "x")  # noqa: E731
    program = spmd.jit(spmd.shard_map(body, PAIR, P("x"), P()), (P("x"),), mesh=PAIR)
    x = arange(8)
    assert_same(program(x), whole(x.sin().view(2, 4).sum(0)))
    assert ["permute", "all_reduce"] == [comm.kind for comm in program.plan(x).comms]
