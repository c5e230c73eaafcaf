"""shard_map: bodies alone and in jit, under transforms, with closed-over values, nested, partly automatic, uneven."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import spmd
from spmd import P
from spmd.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    pcast,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
)
from spmd.collectives.traffic import record_traffic
from spmd.errors import MeshError, ShardingError, SpmdError, TraceError
from spmd.lowering.verify import verify

MESH = spmd.make_mesh({"x": 4}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def whole(tree):
    return tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, tree)


def check(found, expected):
    torch.testing.assert_close(whole(found), expected)


X, W, ROW = draw(8, 4), draw(4, 4), draw(4)
dense = spmd.shard_map(lambda x, w: torch.tanh(x @ w), MESH, (P("x"), P()), P("x"))


def one_device(x, w):
    return torch.tanh(x @ w)


def loss(f):
    return lambda x, w: (f(x, w) ** 2).sum()


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(loss(f), (0, 1)),
    "vjp": lambda f: lambda x, w: torch.func.vjp(f, x, w)[1](f(x, w)),
    "jvp": lambda f: lambda x, w: torch.func.jvp(f, (x, w), (x, w)),
    "grad_of_grad": lambda f: lambda x, w: torch.func.grad(lambda w: torch.func.grad(loss(f), 1)(x, w).sum())(w),
    "hessian": lambda f: lambda x, w: torch.func.hessian(lambda w: loss(f)(x, w))(w),
    "jacrev": lambda f: torch.func.jacrev(loss(f), 1),
    "jacfwd": lambda f: torch.func.jacfwd(loss(f), 1),
    "vmap": lambda f: lambda x, w: torch.func.vmap(f, (None, 0))(x, torch.stack([w, 2 * w])),
    "vmap_of_grad": lambda f: (
        lambda x, w: torch.func.vmap(torch.func.grad(loss(f), 1), (None, 0))(x, torch.stack([w, 2 * w]))
    ),
}

each_transform = pytest.mark.parametrize("name", TRANSFORMS)


@each_transform
def test_transforms_inside_of_jit(name):
    jitted = spmd.jit(TRANSFORMS[name](dense), (P("x"), P()), None, mesh=MESH)
    check(jitted(X, W), TRANSFORMS[name](one_device)(X, W))


@each_transform
def test_transforms_from_outside(name):
    x, w = spmd.distribute(X, P("x"), MESH), spmd.distribute(W, P(), MESH)
    check(TRANSFORMS[name](dense)(x, w), TRANSFORMS[name](one_device)(X, W))


def test_linearize_from_outside():
    x, w = spmd.distribute(X, P("x"), MESH), spmd.distribute(W, P(), MESH)
    check(torch.func.linearize(dense, x, w)[1](x, w), torch.func.jvp(one_device, (X, W), (X, W))[1])


def test_autograd_from_outside():
    x = spmd.distribute(X, P("x"), MESH).requires_grad_()
    (dense(x, spmd.distribute(W, P(), MESH)) ** 2).sum().backward()
    check(x.grad, torch.func.grad(loss(one_device))(X, W))


@pytest.mark.parametrize("check_types", [True, False])
def test_the_gradient_of_a_sum_inside_of_the_body_is_the_same_with_and_without_check(check_types):
    mesh = spmd.make_mesh({"x": 8}, runtime="virtual")

    def body(w, x):
        return torch.func.grad(lambda w: psum((w * x).sum(), "x"))(w)

    f = spmd.shard_map(body, mesh, (P(), P("x")), P(), check=check_types)
    check(f(torch.ones(4), torch.arange(8.0)), torch.full((4,), 28.0))


def test_without_check_the_value_and_the_gradient_are_those_of_index_0():
    f = spmd.shard_map(lambda x: x.sum(0), MESH, P("x"), P(), check=False)
    check(f(X), X[:2].sum(0))
    row = spmd.distribute(ROW, P(), MESH)
    gradient = torch.func.grad(lambda x: (f(x) * row).sum())(spmd.distribute(X, P("x"), MESH))
    check(gradient, torch.cat([ROW.expand(2, 4), torch.zeros(6, 4)]))
    flags = spmd.shard_map(lambda x: x[0] > 0, MESH, P("x"), P(), check=False)
    check(flags(X), X[0] > 0)


def mlp(x, a, b):
    return psum(F.gelu(x @ a) @ b, "y")


MLP = (draw(8, 4), draw(4, 16), draw(16, 4))
MLP_SPECS = (P(), P(None, "y"), P("y"))


def mlp_loss(f):
    return torch.func.grad_and_value(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))


def test_other_axes_stay_automatic():
    body = spmd.shard_map(mlp, GRID, MLP_SPECS, P(), axis_names={"y"})
    specs = (P("x"), P(None, "y"), P("y"))
    jitted = spmd.jit(mlp_loss(body), specs, (specs, P()), mesh=GRID)
    check(jitted(*MLP), mlp_loss(lambda x, a, b: F.gelu(x @ a) @ b)(*MLP))
    verify(jitted.lower(*MLP))


def test_a_dim_is_sharded_by_the_region_and_then_by_the_planner():
    body = spmd.shard_map(lambda x: x - psum(x, "x"), GRID, P("x"), P("x"), axis_names={"x"})
    jitted = spmd.jit(lambda x: body(x.sin()).cos(), P(("x", "y")), P(("x", "y")), mesh=GRID)
    halves = X.sin().view(2, 4, 4)
    check(jitted(X), (halves - halves.sum(0)).view(8, 4).cos())
    assert [("all_reduce", ("x",))] == [(comm.kind, comm.axes) for comm in jitted.plan(X).comms]


def test_nested():
    def inner(x):
        return x + axis_index("y")

    def outer(x):
        return spmd.shard_map(inner, GRID, P(None, "y"), P(None, "y"), axis_names={"y"})(x) + axis_index("x")

    f = spmd.shard_map(outer, GRID, P("x"), P("x"), axis_names={"x"})
    check(f(X), X + torch.tensor([0, 0, 1, 1]) + torch.tensor([0] * 4 + [1] * 4)[:, None])
    again = spmd.shard_map(lambda x: spmd.shard_map(lambda y: y, GRID, P("x"), P("x"))(x), GRID, P("x"), P("x"))
    with pytest.raises(MeshError, match="'x' is manual already where shard_map"):
        again(X)


def test_closed_over_values():
    f = spmd.shard_map(lambda x: x * ROW, MESH, P("x"), P("x"))
    check(f(X), X * ROW)

    def gradient(x, row):
        def scaled(row):
            return spmd.shard_map(lambda x: (x * row) * row, MESH, P("x"), P("x"))(x).sum()

        return torch.func.grad(scaled)(row)

    jitted = spmd.jit(gradient, (P("x"), P()), P(), mesh=MESH)
    check(jitted(X, ROW), torch.func.grad(lambda row: (X * row * row).sum())(ROW))
    assert ["all_reduce"] == [comm.kind for comm in jitted.plan(X, ROW).comms]  # casts of one value are one


def test_pytrees_and_prefixes():
    f = spmd.shard_map(lambda tree: {"sum": psum(tree, "x"), "none": None}, MESH, (P("x"),), P())
    check(
        f({"a": X, "b": (X[:, 0],)}),
        {"sum": {"a": X.view(4, 2, 4).sum(0), "b": (X[:, 0].view(4, 2).sum(0),)}, "none": None},
    )


def test_as_a_decorator_with_the_default_mesh():
    @spmd.shard_map(in_specs=P("x"), out_specs=P())
    def total(x):
        return psum(x.sum(), "x")

    with spmd.use_mesh(MESH):
        check(total(X), X.sum())
    assert "total" in repr(total) and total.__name__ == "total"


COLLECTIVES = {
    "psum": (lambda x: psum(x, "x"), P(), lambda parts: sum(parts)),
    "pmean": (lambda x: pmean(x, "x"), P(), lambda parts: sum(parts) / 4),
    "pmax": (lambda x: pmax(x, "x"), P(), lambda parts: torch.stack(parts).amax(0)),
    "all_gather": (lambda x: all_gather(x, "x", to="invariant"), P(), torch.stack),
    "psum_scatter": (
        lambda x: psum_scatter(x.T, "x", tiled=True),
        P("x"),
        lambda parts: sum(part.T for part in parts),
    ),
    "all_to_all": (lambda x: all_to_all(x, "x", 1, 0, tiled=True), P(None, "x"), torch.cat),
    "ppermute": (
        lambda x: ppermute(x, "x", [(0, 1), (1, 2)]),
        P("x"),
        lambda parts: torch.cat([torch.zeros(2, 4), parts[0], parts[1], torch.zeros(2, 4)]),
    ),
    "axis_index": (
        lambda x: x * axis_index("x"),
        P("x"),
        lambda parts: torch.cat([i * p for i, p in enumerate(parts)]),
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    body, out, expected = COLLECTIVES[name]
    f = spmd.shard_map(body, MESH, P("x"), out)
    reference = lambda x: expected(list(x.chunk(4)))  # noqa: E731
    check(f(X), reference(X).to(X.dtype))
    x = spmd.distribute(X, P("x"), MESH)
    check(torch.func.grad(lambda x: (f(x) ** 3).sum())(x), torch.func.grad(lambda x: (reference(x) ** 3).sum())(X))
    with record_traffic() as traffic:
        f(X)
    planned = f.jitted.plan(X).comms
    assert [(c.kind, c.axes, c.bytes) for c in planned] == [(t.kind, t.axes, max(t.sent)) for t in traffic.transfers]


def test_unreduced_results_are_summed_once_by_the_automatic_program():
    def gradient(w, x):
        return torch.func.grad(lambda w: (x * w).sin().sum())(pcast(w, "x", to="reduced"))

    body = spmd.shard_map(gradient, MESH, (P(), P("x")), P(partial={"x": "sum"}))
    step = spmd.jit(lambda w, a, b: body(w, a) + body(w, b), (P(), P("x"), P("x")), P(), mesh=MESH)
    expected = sum(torch.func.grad(lambda w, x=x: (x * w).sin().sum())(ROW) for x in (X, 2 * X))
    check(step(ROW, X, 2 * X), expected)
    assert ["all_reduce"] == [comm.kind for comm in step.plan(ROW, X, X).comms]


def test_in_specs_may_be_unreduced():
    f = spmd.shard_map(lambda x: psum(2 * x, "x"), MESH, P(partial={"x": "sum"}), P())
    jitted = spmd.jit(lambda x: f(spmd.constrain(x.sum(0), P(partial={"x": "sum"}))), P("x"), P(), mesh=MESH)
    check(jitted(X), 2 * X.sum(0))


class Scaled(torch.autograd.Function):
    """psum, with a gradient of its own, three times that of torch."""

    @staticmethod
    def forward(x):
        return psum(x, "x")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 3 * g


def test_autograd_functions_that_call_collectives():
    f = spmd.shard_map(lambda x: Scaled.apply(x), MESH, P("x"), P())
    jitted = spmd.jit(torch.func.grad(lambda x: f(x * 2).sum()), P("x"), P("x"), mesh=MESH)
    check(jitted(X), torch.full_like(X, 6.0))


def test_random_numbers_are_the_same_on_all_ranks():
    def per_rank(function):
        found = []
        for part in X.chunk(4):
            torch.manual_seed(3)
            found.append(function(part))
        return torch.cat(found)

    for function in (lambda x: x + torch.randn(2, 4), lambda x: torch.bernoulli(x.sigmoid()), lambda x: F.dropout(x)):
        f = spmd.shard_map(function, MESH, P("x"), P("x"))
        torch.manual_seed(3)
        check(f(X), per_rank(function))


def test_axes_of_one_rank_communicate_nothing():
    mesh = spmd.make_mesh({"x": 4, "one": 1}, runtime="virtual")
    f = spmd.shard_map(lambda x: psum(psum(x, ("x", "one")), "one"), mesh, P(("x", "one")), P())
    check(f(X), X.view(4, 2, 4).sum(0))
    assert [("all_reduce", ("x",))] == [(comm.kind, comm.axes) for comm in f.jitted.plan(X).comms]
    nothing = spmd.shard_map(lambda x: ppermute(x, "one", []), mesh, P("x"), P("x", "one"))
    check(nothing(X), torch.zeros(8, 4, dtype=X.dtype))


def test_a_saved_plan_runs_a_manual_region(tmp_path):
    body = spmd.shard_map(mlp, GRID, MLP_SPECS, P(), axis_names={"y"})
    specs = (P("x"), P(None, "y"), P("y"))
    jitted = spmd.jit(mlp_loss(body), specs, (specs, P()), mesh=GRID)
    jitted.plan(*MLP).save(tmp_path / "plan.json")
    again = spmd.jit(mlp_loss(body), specs, (specs, P()), mesh=GRID, plan=tmp_path / "plan.json")
    check(again(*MLP), whole(jitted(*MLP)))


ERRORS = {
    "varying result": (
        lambda x: x.sum(),
        P(),
        ShardingError,
        r"P\(\) says that it is invariant along 'x', and it is varying since .*psum\(x, 'x'\)",
    ),
    "operator of an unreduced value": (
        lambda x: pcast(x, "x", to="unreduced").sin(),
        P("x"),
        TraceError,
        r"aten.sin.default at .* is not linear in f64\[2,4\], which is unreduced along 'x' .*Call psum over 'x' first",
    ),
    "write of varying to invariant": (
        lambda x: torch.zeros(4, dtype=x.dtype).add_(x[0]),
        P("x"),
        TraceError,
        r"add_ at .* writes a value that is varying along 'x' in place to one .* invariant.*pcast",
    ),
    "write by out=": (
        lambda x: torch.add(x, x, out=torch.zeros(2, 4, dtype=x.dtype)),
        P("x"),
        TraceError,
        "writes a value that is varying along 'x' in place",
    ),
    "write by index": (lambda x: ROW.__setitem__(0, x[0, 0]), P("x"), TraceError, "from outside of the shard_map body"),
    "unknown axis": (lambda x: psum(x, "z"), P(), SpmdError, "Unknown mesh axis 'z'"),
    "groups": (lambda x: psum(x, "x", axis_index_groups=[[0, 1]]), P(), SpmdError, "name one of them"),
    "indivisible": (lambda x: psum_scatter(x, "x", tiled=True), P("x"), SpmdError, "must divide into 4 equal chunks"),
    "wrong permutation": (lambda x: ppermute(x, "x", [(0, 1), (2, 1)]), P("x"), SpmdError, "there twice"),
    "number as result": (lambda x: 3, P(), TraceError, "must be a tensor"),
    "spec with too many dims": (lambda x: psum(x.sum(), "x"), P("x"), ShardingError, "names 1 dims"),
    "cast of a varying value": (lambda x: pcast(x, "x", to="reduced"), P("x"), SpmdError, "cannot be cast to reduced"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    body, out, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        spmd.shard_map(body, MESH, P("x"), out)(X)


def test_errors_of_specs():
    with pytest.raises(MeshError, match=r"axis_names has 'z'"):
        spmd.shard_map(lambda x: x, MESH, P(), P(), axis_names={"z"})(X)
    with pytest.raises(ShardingError, match=r"names 'x', which is not manual here"):
        spmd.jit(spmd.shard_map(lambda x: x, GRID, P("x"), P(), axis_names={"y"}), P(), None, mesh=GRID)(X)
    with pytest.raises(SpmdError, match=r"No mesh axis is bound at .*inside spmd.shard_map"):
        psum(X, "x")


def test_manual_axes_cannot_be_constrained():
    constrained = spmd.shard_map(lambda x: spmd.constrain(x, P("x")), MESH, P("x"), P("x"))
    with pytest.raises(ShardingError, match="which is manual in this"):
        constrained(X)
    inner = spmd.jit(lambda x: x * 2, P("x"), P("x"), mesh=MESH)
    with pytest.raises(ShardingError, match="which is manual in this"):
        spmd.shard_map(lambda x: inner(x), MESH, P("x"), P("x"))(X)
    replicated = spmd.jit(lambda x: x * 2, P(), P(), mesh=MESH)
    check(spmd.shard_map(lambda x: replicated(x), MESH, P("x"), P("x"))(X), 2 * X)


@pytest.mark.parametrize(
    "use", [lambda y, held: y.sum() + held.sum(), lambda y, held: held.sin()], ids=["mixed", "alone"]
)
def test_per_rank_values_cannot_leave_without_a_spec(use):
    held = []

    def body(x):
        held.append(x)
        return x

    f = spmd.shard_map(body, MESH, P("x"), P("x"))
    with pytest.raises(TraceError, match="is used outside of it"):
        spmd.jit(lambda x: use(f(x), held[-1]), P("x"), None, mesh=MESH)(X)


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (8, 0), (0, 3), (8, 2)], ids=str)
def test_dtypes_and_empty_tensors(dtype, shape):
    x = (torch.arange(8 * 6).reshape(8, 6)[: shape[0], : shape[1] if len(shape) > 1 else None] % 5).to(dtype)
    x = x[:, 0] if len(shape) == 1 else x
    parts = x.reshape(4, shape[0] // 4, *shape[1:])
    wide = parts.to(torch.int64) if dtype is torch.bool else parts
    total = wide.sum(0).to(wide.dtype)

    def body(x):
        scalar = psum(axis_index("x"), "x")
        return psum(x, "x"), all_gather(x, "x", tiled=True, to="invariant"), ppermute(x, "x", [(0, 1)]), scalar

    f = spmd.shard_map(body, MESH, P("x"), (P(), P(), P("x"), P()))
    found = whole(f(x))
    moved = torch.zeros_like(x)
    moved[len(x) // 4 : len(x) // 2] = parts[0]
    check(found, (total, x, moved, torch.tensor(6)))


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
def test_tuples_of_axes_act_as_one_with_the_first_one_major(axes):
    def body(x):
        return all_gather(x, axes, tiled=True, to="invariant"), psum(x, axes), axis_index(axes)[None]

    f = spmd.shard_map(body, GRID, P(axes), (P(), P(), P(axes)))
    check(f(X), (X, X.view(4, 2, 4).sum(0), torch.arange(4)))


def test_arguments_go_by_position():
    double = spmd.shard_map(lambda x: 2 * x, MESH, P(), P())
    with pytest.raises(TraceError, match=r"takes its arguments by position, .* \(got x by name\)"):
        double(x=torch.ones(2))
