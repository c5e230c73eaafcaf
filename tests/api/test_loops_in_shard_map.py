"""Loops and branches in shard_map bodies, with collectives in them, beside ranks that run them as they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import spmd
from spmd import P
from spmd.collectives import axis_index, pcast, pmax, ppermute, psum

Function = Callable[[Tensor, Tensor, Tensor], Any]

MESH = spmd.make_mesh({"x": 3}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
SPECS = P("x"), P(), P(None, "x")
OUTSIDE = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def arguments(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    shapes = (rows, 4), (4, 4), (3, rows, 4)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes)  # type: ignore[return-value]


def rnn(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    carry, ys = spmd.scan(lambda c, r: (torch.tanh(c @ w + r), c.sin()), x, xs)
    return carry + ys.sum(0)


def blocks(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    return spmd.scan(lambda c, r: (torch.tanh(c @ w + r), None), x, xs, reverse=True, unroll=2)[0]


def becomes_varying(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    return x + spmd.scan(lambda c, r: (c + (r @ w).sum(), None), torch.zeros((), dtype=x.dtype), xs)[0]


def stays_invariant(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    step = lambda c, r: (torch.tanh(c + psum((r @ w).sum(), "x")), None)  # noqa: E731
    return x * spmd.scan(step, torch.zeros((), dtype=x.dtype), xs)[0]


def reads_sum_and_shard(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    return spmd.fori_loop(0, 3, lambda i, c: torch.sin(c @ w) + i * psum(c.sum(), "x") * w.sum() / 9, x)


def nested(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    def body(c: Tensor, r: Tensor) -> Any:
        d = spmd.fori_loop(0, 2, lambda i, d: torch.sin(d @ w + psum(d.sum(), "x")), c)
        return d + r, d.sum() / 9

    carry, ys = spmd.scan(body, x, xs)
    return carry * ys.sum()


def of_outside(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    literal = lambda: torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)  # noqa: E731
    return spmd.scan(lambda c, r: (torch.tanh(c @ OUTSIDE + r * literal()) * axis_index("x"), None), x, xs)[0]


def gradient_inside(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        return psum((spmd.scan(lambda c, r: (torch.tanh(c @ w + r), None), x, xs)[0] ** 2).sum(), "x")

    return x @ torch.func.grad(loss)(w)


def batched(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    step = lambda c, r: (torch.tanh(c @ w) + psum(r.sum(), "x") / 9, None)  # noqa: E731
    return torch.vmap(lambda row: spmd.scan(step, row, xs)[0])(x)


def transforms_in_a_body(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    def body(c: Tensor, r: Tensor) -> Any:
        slope = torch.func.grad(lambda c: torch.sin(c @ w).sum())(c)
        return torch.func.jvp(lambda c: torch.tanh(c @ w), (slope,), (r,))[1] + c, None

    return spmd.scan(body, x, xs)[0]


def one_for_all(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    shared = lambda: torch.sin(x @ w) + psum((x @ w).sum(), "x")  # noqa: E731
    return spmd.cond(psum(x.sum(), "x") > 0, shared, lambda: x * w.sum())


def parts(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    return spmd.cond(x.sum() > 0, lambda: torch.sin(x @ w), lambda: x * w.sum())


def parts_in_a_loop(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    def body(c: Tensor, r: Tensor) -> Any:
        c = spmd.cond(axis_index("x") == 0, lambda: torch.sin(c @ w), lambda: spmd.fori_loop(0, 2, double, c))
        return c + psum(r.sum(), "x"), None

    double = lambda i, c: c * w.sum() / 4  # noqa: E731
    return spmd.scan(body, x, xs)[0]


def until_all(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    return spmd.while_loop(
        lambda c: pmax(c.square().sum(), "x") > 1e-2, lambda c: c * 0.5 + psum(c.sum(), "x") * 1e-3, x
    )


def until_each(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    state = spmd.while_loop(
        lambda s: s["x"].square().sum() > 1e-2, lambda s: {"x": s["x"] / 2, "n": s["n"] + 1}, {"x": x, "n": 0}
    )
    return state["x"] * state["n"]


def each_own_number(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    return spmd.fori_loop(0, axis_index("x") + 1, lambda i, c: torch.sin(c) + i, x)


DIFFERENTIABLE: tuple[Function, ...] = (
    rnn, blocks, becomes_varying, stays_invariant, reads_sum_and_shard, nested, of_outside, gradient_inside, batched,
    transforms_in_a_body, one_for_all,
)  # fmt: skip
FORWARD: tuple[Function, ...] = until_all, until_each, each_own_number


def whole(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, tree)


def check(function: Callable[..., Any], mesh: Any, rows: int) -> None:
    given = arguments(rows)
    with spmd.disable_jit():
        wanted = whole(function(*given))
    found = whole(spmd.jit(function, SPECS, mesh=mesh)(*given))
    torch.testing.assert_close(found, wanted)


def with_gradients(function: Function, mesh: Any) -> Callable[..., Any]:
    mapped = spmd.shard_map(function, mesh, SPECS, P("x"))

    def loss(*given: Tensor) -> Any:
        result = mapped(*given)
        return (result**2).sum(), result

    return lambda *given: torch.func.grad(loss, (0, 1, 2), has_aux=True)(*given)


@pytest.mark.parametrize("function", DIFFERENTIABLE)
@pytest.mark.parametrize("rows", [6, pytest.param(7, marks=pytest.mark.slow), 2])  # even, uneven, with an empty shard
def test_values_and_gradients(function: Function, rows: int) -> None:
    check(with_gradients(function, MESH), MESH, rows)


@pytest.mark.slow
@pytest.mark.parametrize("function", DIFFERENTIABLE)
@pytest.mark.parametrize("kind", ["grad of grad", "jvp", "grad of jit"])
def test_transforms(function: Function, kind: str) -> None:
    mapped = spmd.shard_map(function, GRID, SPECS, P("x"))
    gradients: Any = torch.func.grad(lambda *given: mapped(*given).square().sum(), (0, 1, 2))
    given = arguments(4)
    if kind == "jvp":
        check(lambda *given: torch.func.jvp(mapped, given, tuple(x.cos() for x in given)), GRID, 4)
    elif kind == "grad of grad":
        inner: Any = torch.func.grad(lambda w: sum(g.square().sum() for g in gradients(given[0], w, given[2])))
        check(lambda x, w, xs: inner(w), GRID, 4)
    else:
        jitted = spmd.jit(mapped, SPECS, mesh=GRID)
        placed = [spmd.distribute(x, spec, GRID) for x, spec in zip(given, SPECS, strict=True)]
        outside: Any = torch.func.grad(lambda *given: jitted(*given).square().sum(), (0, 1, 2))
        with spmd.disable_jit():
            wanted = whole(gradients(*given))
        torch.testing.assert_close(whole(outside(*placed)), wanted)


@pytest.mark.parametrize("function", FORWARD)
@pytest.mark.parametrize("rows", [6, 7])
def test_lengths_that_are_data(function: Function, rows: int) -> None:
    mapped = spmd.shard_map(function, MESH, SPECS, P("x"))
    check(mapped, MESH, rows)
    if rows == 6:
        check(lambda *given: torch.func.jvp(mapped, given, given)[1], MESH, rows)


@pytest.mark.parametrize("function", [parts, parts_in_a_loop])
@pytest.mark.parametrize("rows", [6, 7])
def test_ranks_that_part(function: Function, rows: int) -> None:
    check(spmd.shard_map(function, MESH, SPECS, P("x")), MESH, rows)


def test_gradients_of_ranks_that_part() -> None:
    def selected(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
        return torch.where(x.sum() > 0, torch.sin(x @ w), x * w.sum())

    given = arguments(6)
    found, wanted = (spmd.jit(with_gradients(f, MESH), SPECS, mesh=MESH)(*given) for f in (parts, selected))
    torch.testing.assert_close(whole(found), whole(wanted))


def test_gradients_of_ranks_that_part_along_one_of_two_axes() -> None:
    """Along the other one a cast in a side would be a sum of gradients there, which not all ranks run."""

    def rows(x: Tensor, w: Tensor) -> Tensor:
        return spmd.cond(x.sum() > 0, lambda: torch.tanh(x).sum() * w, lambda: w * 1)

    def wanted(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([torch.tanh(c).sum() * w if c.sum() > 0 else w for c in x.chunk(2)])

    x, w, _ = arguments(4)
    specs = P("x"), P(None, "y")
    mapped = spmd.shard_map(rows, GRID, specs, P("x", "y"))
    found, expected = (torch.func.grad(lambda x, w, f=f: f(x, w).sin().sum(), (0, 1)) for f in (mapped, wanted))
    torch.testing.assert_close(whole(spmd.jit(found, specs, mesh=GRID)(x, w)), expected(x, w))


def test_a_region_in_a_body_returns_what_it_closes_over() -> None:
    x, w, _ = arguments(6)

    def run(w: Tensor) -> Tensor:
        def body(c: Tensor, _: Any) -> Any:
            kept, rows = spmd.shard_map(lambda c: (w, c), MESH, P("x"), (P(), P("x")))(c)
            return torch.sin(rows @ kept), None

        return spmd.scan(body, x, length=2)[0]

    moved = lambda f: lambda w: torch.func.jvp(f, (w,), (w.cos(),))  # noqa: E731
    wanted = moved(lambda w: torch.sin(torch.sin(x @ w) @ w))(w)
    torch.testing.assert_close(whole(spmd.jit(moved(run), P(), mesh=MESH)(w)), wanted)


def test_gradients_of_what_a_region_in_a_body_closes_over() -> None:
    x, w, _ = arguments(6)

    def rows(x: Tensor, w: Tensor) -> Tensor:
        shared = psum(w, "x")
        region = lambda c: spmd.shard_map(lambda: torch.sin(c @ shared), GRID, (), P(), axis_names=["y"])()  # noqa: E731
        return spmd.scan(lambda c, _: (region(c), None), x, length=2)[0]

    mapped = spmd.shard_map(rows, GRID, (P("x"), P()), P("x"), axis_names=["x"])
    step = lambda c, w: torch.sin(c @ (2 * w))  # noqa: E731
    found, wanted = (
        torch.func.grad(lambda x, w, f=f: f(x, w).square().sum(), (0, 1))
        for f in (mapped, lambda x, w: step(step(x, w), w))
    )
    torch.testing.assert_close(whole(spmd.jit(found, (P("x"), P()), mesh=GRID)(x, w)), wanted(x, w))


def test_branches_of_a_tensor_from_outside_under_a_transform_from_outside() -> None:
    scaled = lambda x: x * spmd.cond(x.sum() > 0, lambda c: c, lambda c: c * 1, OUTSIDE)  # noqa: E731
    mapped = spmd.shard_map(scaled, MESH, (P(None, "x"),), P(None, "x"))
    x = torch.ones(4, 12, dtype=torch.float64)
    found = torch.func.grad(lambda x: mapped(x).sum())(spmd.distribute(x, P(None, "x"), MESH))
    torch.testing.assert_close(whole(found), OUTSIDE.repeat(1, 3))


def test_second_gradients_of_what_no_gradient_reaches_on_uneven_shards() -> None:
    """Sums of zeros in a loop belong to the region, and some ranks only have them."""

    def rows(x: Tensor) -> Tensor:
        shared = spmd.collectives.all_gather(x.sum(0), "y")
        step = lambda c, _: (spmd.cond(shared.sum() > 0, lambda: c, lambda: c * 1), None)  # noqa: E731
        return spmd.scan(step, shared, length=3)[0]

    mapped = spmd.shard_map(rows, GRID, P(("y", "x")), P(("x", "y")), check=False)
    gradient = lambda f: torch.func.grad(lambda x: f(x).sin().sum())  # noqa: E731
    twice = lambda f: torch.func.grad(lambda x: gradient(f)(x).square().sum())  # noqa: E731
    x = torch.arange(7.0, dtype=torch.float64)
    sums = lambda x: torch.stack([x[:2].sum(), x[4:6].sum(), x[:2].sum(), x[4:6].sum()])  # noqa: E731
    others = lambda x: torch.stack([x[2:4].sum(), x[6:].sum(), x[2:4].sum(), x[6:].sum()])  # noqa: E731
    wanted = twice(lambda x: torch.cat([sums(x), others(x)]))(x)
    torch.testing.assert_close(whole(spmd.jit(twice(mapped), P(("y", "x")), mesh=GRID)(x)), wanted)


def test_ring_attention_by_scan() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks = spmd.collectives.axis_size("x")

        def step(state: Any, _: Any) -> Any:
            total, weights, k, v = state
            scores = torch.exp(q @ k.T)
            k, v = (ppermute(x, "x", [(i, (i + 1) % ranks) for i in range(ranks)]) for x in (k, v))
            return (total + scores @ state[3], weights + scores.sum(-1), k, v), None

        start = torch.zeros_like(q), q.new_zeros(q.shape[0]), k, v
        (total, weights, _, _), _ = spmd.scan(step, start, length=ranks)
        return total / weights[:, None]

    q, k, v = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    specs = (P("x"),) * 3
    ring = spmd.shard_map(attend, MESH, specs, P("x"))
    on_one = lambda q, k, v: torch.softmax(q @ k.T, -1) @ v  # noqa: E731
    torch.testing.assert_close(whole(spmd.jit(ring, specs, mesh=MESH)(q, k, v)), on_one(q, k, v))
    gradient = lambda f: torch.func.grad(lambda *given: f(*given).square().sum(), (0, 1, 2))  # noqa: E731
    found = spmd.jit(gradient(ring), specs, mesh=MESH)
    torch.testing.assert_close(whole(found(q, k, v)), gradient(on_one)(q, k, v))
    sent = {comm.times for comm in found.plan(q, k, v).comms if comm.kind == "permute"}
    assert sent == {3}


def test_the_gradient_of_a_weight_is_summed_once() -> None:
    mapped = spmd.shard_map(rnn, MESH, SPECS, P("x"))
    gradient = spmd.jit(torch.func.grad(lambda *given: mapped(*given).square().sum(), 1), SPECS, mesh=MESH)
    assert [(comm.kind, comm.times) for comm in gradient.plan(*arguments(6)).comms] == [("all_reduce", 1)]


def inner_region_in_a_branch(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    """The branch is in a region along y, and takes what varies along x."""

    def inner(w: Tensor) -> Tensor:
        return spmd.cond(psum(w.sum(), "y") > 0, lambda: x * 2, lambda: x * 3)

    both = spmd.shard_map(inner, GRID, P("y"), P(), axis_names=["y"])(w)
    return psum(both, "x") * x


def reduced(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    shared = pcast(w, "x", to="reduced")
    return x @ spmd.scan(lambda c, _: (c * torch.cos(w), None), shared, length=2)[0]


def chosen_rows(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
    """The second derivative of a side is zero: a sum over ranks, too."""
    shared = pcast(w, "x", to="reduced")
    doubled = lambda: shared.index_add(0, torch.tensor([0]), shared[:1])  # noqa: E731
    return x @ torch.sigmoid(spmd.cond(psum(x.sum(), ("x", "y")) > 0, doubled, lambda: shared * 1))


@pytest.mark.parametrize(
    ("function", "axes"), [(inner_region_in_a_branch, ["x"]), (reduced, ["x", "y"]), (chosen_rows, ["x", "y"])]
)
def test_second_gradients_of_other_types(function: Function, axes: list[str]) -> None:
    mapped = spmd.shard_map(function, GRID, SPECS, P("x"), axis_names=axes)
    first: Any = torch.func.grad(lambda *given: mapped(*given).square().sum(), (0, 1))
    second: Any = torch.func.grad(lambda *given: sum(g.square().sum() for g in first(*given)), (0, 1))
    check(lambda *given: (first(*given), second(*given)), GRID, 4)


@pytest.mark.parametrize("rows", [7, 2])  # one row on the last rank only, or on the first two
@pytest.mark.parametrize(
    "of_one_row",
    [
        lambda x: spmd.fori_loop(0, 3, lambda i, c: torch.sin(c) * 2, x),
        lambda x: spmd.cond(x.sum() > 0, torch.sin, torch.cos, x),
        lambda x: spmd.while_loop(lambda c: c.abs().sum() < 9, lambda c: c * 2 + 1, x),
    ],
)
def test_loops_of_some_ranks(of_one_row: Callable[[Tensor], Tensor], rows: int) -> None:
    def body(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
        x = of_one_row(x) if x.shape[0] == 1 else x
        total = psum(x.sum(), "x")
        return x * spmd.scan(lambda c, _: (psum(c.sin(), "x"), None), total, length=2)[0]

    check(spmd.shard_map(body, MESH, SPECS, P("x")), MESH, rows)


def test_results_of_branches_that_depend_on_nothing() -> None:
    def body(x: Tensor, w: Tensor, xs: Tensor) -> Tensor:
        sides = lambda: (psum(x.sum(), "x"), torch.zeros(2)), lambda: (x.sum() * 1, torch.ones(2))
        total, fixed = spmd.cond(torch.eye(2).sum() > 0, *sides)
        return x * total * (fixed + 1).sum()

    check(with_gradients(body, MESH), MESH, 7)


X = torch.ones(6, 4)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            lambda x: spmd.while_loop(lambda s: s.sum() < 99, lambda s: s + psum(s.sum(), "x"), x),
            r"predicate of while_loop at .* varies along 'x', so only some ranks may run its body, and all_reduce .*"
            r"is run by all ranks or none.*pmax\(predicate.int\(\), 'x'\) > 0",
        ),
        (
            lambda x: spmd.cond(x.sum() > 3, lambda: psum(x.sum(), "x") * x, lambda: x),
            "predicate of cond at .* varies along 'x', so only some ranks may run its body, and all_reduce",
        ),
        (
            lambda x: spmd.cond(x.sum() > 3, lambda: x + torch.rand(()), lambda: x),
            "predicate of cond at .* varies along 'x'.*rand at .* is run by all.*move the operation out",
        ),
        (
            lambda x: spmd.cond(pcast(x.sum(), "x", to="unreduced") > 0, lambda: x, lambda: -x),
            "unreduced along 'x'",
        ),
        (
            lambda x: (
                spmd.scan(lambda c, _: (c + pcast(x.sum(), "x", to="unreduced"), None), x.new_ones(()), length=2)[0] * x
            ),
            "unreduced along 'x'",
        ),
    ],
)  # fmt: skip
def test_mistakes(body: Callable[[Tensor], Tensor], text: str) -> None:
    with pytest.raises(spmd.TraceError, match=text):
        spmd.shard_map(body, MESH, P("x"), P("x"))(X)


def test_collectives_in_loops_that_differ_between_ranks() -> None:
    def body(x: Tensor) -> Tensor:
        step = lambda c, _: (psum(c, "x") / 3, None)  # noqa: E731
        of_two = lambda c, _: (step(*step(c, None))[0], None)  # noqa: E731
        if x.shape[0] == 1:
            return x * spmd.scan(of_two, x.sum(), length=2)[0]
        return x * spmd.scan(step, spmd.scan(step, x.sum(), length=2)[0], length=2)[0]

    with pytest.raises(spmd.DivergenceError, match="Ranks whose shards differ in shape call different collectives"):
        spmd.jit(spmd.shard_map(body, MESH, P("x"), P("x")), P("x"), mesh=MESH)(X[:5])
