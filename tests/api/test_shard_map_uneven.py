"""shard_map of uneven shards: each rank's program has its own shapes, and all call the same collectives."""

import pytest
import torch
from torch.utils._pytree import tree_map

import spmd
from spmd import P
from spmd.collectives import all_gather, all_to_all, pmax, ppermute, psum, psum_scatter
from spmd.errors import DivergenceError, ShardingError, TraceError
from spmd.lowering.verify import verify

MESH = spmd.make_mesh({"x": 4}, runtime="virtual")


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def check(found, expected):
    whole = tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, found)
    torch.testing.assert_close(whole, expected)


X, W = draw(8, 4), draw(4, 4)


SIZES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("length", [10, 3])
def test_uneven_shards(n, length):
    mesh = spmd.make_mesh({"x": n}, runtime="virtual")
    x, row = draw(length, 4), draw(1, 4)

    def body(x, row):
        scaled = x * row + torch.zeros(x.shape[0], 1)
        return scaled, psum(scaled.sum(0), "x"), all_gather(x, "x", tiled=True, size=length, to="invariant")

    def reference(x, row):
        return x * row, (x * row).sum(0), x

    f = spmd.shard_map(body, mesh, (P("x"), P()), (P("x"), P(), P()))
    check(f(x, row), reference(x, row))
    both = lambda f: torch.func.grad(lambda x, row: sum((leaf**3).sum() for leaf in f(x, row)), (0, 1))  # noqa: E731
    jitted = spmd.jit(both(f), (P("x"), P()), None, mesh=mesh)
    check(jitted(x, row), both(reference)(x, row))
    verify(jitted.lower(x, row))
    outside = both(f)(spmd.distribute(x, P("x"), mesh), spmd.distribute(row, P(), mesh))
    check(outside, both(reference)(x, row))


def test_uneven_shards_over_two_axes_in_either_order():
    mesh, x = spmd.make_mesh({"x": 2, "y": 3}, runtime="virtual"), draw(11, 7)
    for spec in (P(("x", "y")), P(("y", "x")), P("y", "x"), P(None, ("y", "x"))):
        f = spmd.shard_map(lambda x: x.sin() + psum(x.sum(), ("x", "y")), mesh, spec, spec)
        jitted = spmd.jit(lambda x, f=f: f(x * 2), P("x"), P("y"), mesh=mesh)
        check(jitted(x), (2 * x).sin() + 2 * x.sum())


def test_uneven_shards_beside_automatic_axes():
    mesh, x = spmd.make_mesh({"x": 2, "y": 3}, runtime="virtual"), draw(10, 4)
    f = spmd.shard_map(lambda a, w: torch.tanh(a @ w), mesh, (P("y"), P()), P("y"), axis_names={"y"})
    jitted = spmd.jit(lambda x, w: f(x.sin(), w).cos(), (P(("y", "x")), P()), P("x"), mesh=mesh)
    check(jitted(x, W), torch.tanh(x.sin() @ W).cos())


def test_ranks_must_call_the_same_collectives():
    def body(x):
        return psum(x.sum(), "x") if x.shape[0] > 1 else x.sum()

    f = spmd.shard_map(body, MESH, P("x"), P(), check=False)
    with pytest.raises(DivergenceError, match=r"rank at \(0,\) calls all_reduce of f64\[\] at .*\(3,\) calls nothing"):
        f(draw(7, 2))
    gather = spmd.shard_map(lambda x: all_gather(x, "x", tiled=True), MESH, P("x"), P("x"))
    with pytest.raises((DivergenceError, ShardingError)):
        gather(draw(7, 2))


GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def test_ranks_that_call_a_collective_together_hold_equal_shapes():
    x, row = draw(4, 3), draw(3)
    scaled = spmd.shard_map(lambda x, row: x * row, GRID, (P("x", "y"), P("y")), P("x", "y"))
    both = lambda f: torch.func.grad(lambda x, row: (f(x, row) ** 2).sum(), (0, 1))  # noqa: E731
    specs = (P("x", "y"), P("y"))
    check(spmd.jit(both(scaled), specs, specs, mesh=GRID)(x, row), both(torch.mul)(x, row))
    total = spmd.shard_map(lambda x: psum(x, "x"), GRID, P("x", "y"), P(None, "y"))
    check(total(x), x[:2] + x[2:])
    gathered = spmd.shard_map(lambda x: all_gather(x, "x", tiled=True), GRID, P("x", "y"), P("x", "y"))
    gradient = lambda f: torch.func.grad(lambda x: (f(x) ** 3).sum())  # noqa: E731
    check(spmd.jit(gradient(gathered), P(), P(), mesh=GRID)(x), gradient(lambda x: torch.cat([x, x]))(x))


@pytest.mark.parametrize(
    "body",
    [
        lambda x: psum(x, "y"),
        lambda x: all_gather(x, "y", axis=0, tiled=True),
        lambda x: all_to_all(x, "y", 0, 1, tiled=True),
        lambda x: ppermute(x, "y", [(0, 1), (1, 0)]),
        lambda x: psum_scatter(x, "y", tiled=True),
    ],
)
def test_ranks_that_call_a_collective_together_with_unequal_shapes(body):
    f = spmd.shard_map(lambda x: body(x).sum(), GRID, P(None, ("x", "y")), P(), check=False)
    with pytest.raises(DivergenceError, match=r"the rank at \(1, 0\) .* the one at \(1, 1\)"):
        f(draw(4, 7))


@pytest.mark.parametrize("length", [4, 5])
def test_bodies_inside_of_others_shard_nothing_where_any_shards_are_uneven(length):
    def nested(spec):
        inner = spmd.shard_map(lambda x: psum(x, "x"), GRID, spec, P(), axis_names={"x"})
        outer = spmd.shard_map(inner, GRID, P(None, "y"), P(None, "y"), axis_names={"y"})
        columns = spmd.shard_map(lambda x: x * 2, GRID, P(None, ("x", "y")), P(None, ("x", "y")))
        return spmd.jit(lambda x: outer(x) + columns(x)[:1], P(), P(), mesh=GRID)

    x = draw(2, length)
    check(nested(P())(x), 2 * x + 2 * x[:1])
    if length == 4:
        check(nested(P("x"))(x), x.sum(0, keepdim=True) + 2 * x[:1])
    else:
        with pytest.raises(TraceError, match=r"A shard_map inside .* has the spec P\('x'\) .* must be P\(\)"):
            nested(P("x"))(x)


def test_random_shapes_and_printing_of_uneven_shards(capsys):
    x = draw(7, 2)
    draws = spmd.shard_map(lambda x: x + torch.randn(x.shape), MESH, P("x"), P("x"))
    with pytest.raises(TraceError, match="draws random numbers of another shape on the rank at"):
        draws(x)

    def body(x):
        spmd.debug.print("{} rows", x.shape[0])
        return x + torch.randn(2, dtype=x.dtype)

    torch.manual_seed(0)
    found = spmd.shard_map(body, MESH, P("x"), P("x"))(x)
    torch.manual_seed(0)
    check(found, x + torch.randn(2, dtype=x.dtype))
    assert capsys.readouterr().out.splitlines() == [f"[rank {i}] {rows} rows" for i, rows in enumerate((2, 2, 2, 1))]


def _sums(x):
    """The sums of the chunks of four ranks, of the empty ones too."""
    sums = [part.sum(0) for part in x.split(-(-len(x) // 4))]
    return torch.stack([*sums, *[x.new_zeros(3)] * (4 - len(sums))])


BODIES = {
    "local": (lambda x, n: torch.tanh(x) * 2, P("x"), lambda x: torch.tanh(x) * 2),
    "sum": (lambda x, n: psum((x * x).sum(0), "x"), P(), lambda x: (x * x).sum(0)),
    "maximum": (lambda x, n: pmax(x.sum(0), "x"), P(), lambda x: _sums(x).amax(0)),
    "gather": (lambda x, n: x * all_gather(x, "x", tiled=True, size=n).sum(0), P("x"), lambda x: x * x.sum(0)),
    "scatter": (
        lambda x, n: psum_scatter(all_gather(x, "x", tiled=True, size=n), "x", tiled=True, size=len(x)),
        P("x"),
        lambda x: 4 * x,
    ),
    "broadcast": (lambda x, n: x + x.new_ones(1, 3) * psum(x.sum(), "x"), P("x"), lambda x: x + x.sum()),
    "branch": (lambda x, n: x.sin() if len(x) else x * 2, P("x"), torch.sin),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("length", [1, 5, 7, 12])
def test_bodies_of_uneven_shards(name, length):
    body, out, expected = BODIES[name]
    x = draw(length, 3)
    f = spmd.shard_map(lambda x: body(x, length), MESH, P("x"), out)
    check(f(x), expected(x))
    gradient = lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum())  # noqa: E731
    check(spmd.jit(gradient(f), P("x"), P("x"), mesh=MESH)(x), gradient(expected)(x))
    check(gradient(f)(spmd.distribute(x, P("x"), MESH)), gradient(expected)(x))
    second = lambda f: torch.func.grad(lambda x: (gradient(f)(x) ** 2).sum())  # noqa: E731
    check(spmd.jit(second(f), P("x"), P("x"), mesh=MESH)(x), second(expected)(x))


def test_a_rank_may_contribute_a_constant():
    f = spmd.shard_map(lambda x: psum(x.sum(0) if len(x) else x.new_zeros(3), "x"), MESH, P("x"), P())
    x = draw(5, 3)
    check(f(x), x.sum(0))
    ones = spmd.shard_map(lambda x: psum(torch.ones(4, 4), "x"), MESH, P("x"), P())
    check(ones(X), torch.full((4, 4), 4.0))


def test_constants_that_a_body_makes():
    x = draw(5)

    def body(x):
        whole = all_gather(x, "x", tiled=True, size=5)
        picked = whole.index_select(0, torch.tensor([0, 4]))
        return picked.sum() * x.index_add(0, torch.tensor([len(x) - 1]), x[:1]) if len(x) else x * picked.sum()

    def reference(x):
        parts = [part.index_add(0, torch.tensor([len(part) - 1]), part[:1]) for part in x.split(2)]
        return (x[0] + x[4]) * torch.cat(parts)

    f = spmd.shard_map(body, MESH, P("x"), P("x"))
    check(f(x), reference(x))
    gradient = lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum())  # noqa: E731
    check(spmd.jit(gradient(f), P("x"), P("x"), mesh=MESH)(x), gradient(reference)(x))
    check(gradient(f)(spmd.distribute(x, P("x"), MESH)), gradient(reference)(x))


def test_constants_outside_of_the_body():
    f = spmd.shard_map(lambda x: psum(x.sum(), "x"), MESH, P("x"), P())
    x = draw(5)
    check(spmd.jit(lambda x: f(x) + torch.ones(3), P("x"), None, mesh=MESH)(x), x.sum() + torch.ones(3))
    picked = spmd.jit(lambda x: f(x) * x.index_select(0, torch.tensor([0, 4])), P("x"), None, mesh=MESH)
    check(picked(x), x.sum() * x[[0, 4]])
    gradient = lambda f: torch.func.grad(lambda x: f(x) * f(x) + 0.3 * f(x))  # noqa: E731
    check(spmd.jit(gradient(f), P("x"), P("x"), mesh=MESH)(x), gradient(torch.sum)(x))


def test_constants_outside_of_the_body_that_a_backward_program_reads():
    f = spmd.shard_map(lambda x: psum(x.sum(), "x"), MESH, P("x"), P())
    x = draw(5)
    scaled = lambda total: total**2 * torch.ones(3).index_add(0, torch.tensor([0]), torch.ones(1))  # noqa: E731
    step = spmd.jit(lambda x: scaled(f(x)), P("x"), None, mesh=MESH)
    found = torch.func.grad(lambda x: step(x).sum())(spmd.distribute(x, P("x"), MESH))
    check(found, torch.func.grad(lambda x: scaled(x.sum()).sum())(x))
