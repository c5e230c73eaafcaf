"""Loops and branches in programs, under transforms on either side, beside Python's own on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop_cases import (
    FORWARD,
    FUNCTIONS,
    LOOPS_OF_UNKNOWN_LENGTH,
    PLACES,
    TRANSFORMS,
    arguments,
    branch_in_loop,
    check,
    check_all,
    newton,
    rnn,
)
from sampling import product, sample
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from workers import Workers, call_on_mesh

import spmd
from spmd import P
from spmd.errors import TraceError

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
SPECS = PLACES[0][2]


def close(found: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, wanted)


@pytest.mark.parametrize(("function", "transform", "place"), product(FUNCTIONS, TRANSFORMS, range(len(PLACES))))
def test_jit(function: Callable[..., Any], transform: str, place: int) -> None:
    check(spmd.make_mesh(PLACES[place][0], runtime="virtual"), function, transform, place)


@pytest.mark.parametrize(("function", "transform", "place"), product(LOOPS_OF_UNKNOWN_LENGTH, FORWARD, range(3)))
def test_unknown_length(function: Callable[..., Any], transform: str, place: int) -> None:
    check(spmd.make_mesh(PLACES[place][0], runtime="virtual"), function, transform, place)


@pytest.mark.parametrize("axes", sample([axes for axes, *_ in PLACES], fast=[PLACES[0][0]]), ids=str)
def test_processes(workers: Workers, axes: dict[str, int]) -> None:
    workers.run(call_on_mesh, check_all, axes, "distributed", ranks=math.prod(axes.values()))


def loss(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
    carry, sums = branch_in_loop(h, xs, w)
    return carry.square().sum() + sums.sin().sum()  # type: ignore[no-any-return]


def test_transforms_from_outside() -> None:
    h, xs, w = arguments(0)
    jitted: Any = spmd.jit(loss, SPECS, mesh=MESH)
    close(torch.func.grad(jitted, 2)(h, xs, w), torch.func.grad(loss, 2)(h, xs, w))
    close(torch.func.hessian(jitted, 0)(h, xs, w), torch.func.hessian(loss, 0)(h, xs, w))
    close(
        torch.vmap(jitted, (0, None, None))(torch.stack([h, -h]), xs, w), torch.stack([loss(h, xs, w), loss(-h, xs, w)])
    )
    given = spmd.distribute((h, xs, w), SPECS, mesh=MESH)
    for tensor in given:
        tensor.requires_grad_()
    jitted(*given).backward()
    for tensor, wanted in zip(given, torch.func.grad(loss, (0, 1, 2))(h, xs, w), strict=True):
        close(tensor.grad, wanted)


def test_disable_jit() -> None:
    h, xs, w = arguments(0)
    with spmd.disable_jit():
        close(spmd.jit(loss, SPECS, mesh=MESH)(h, xs, w), loss(h, xs, w))


def test_shard_map_in_a_body() -> None:
    h, xs, _ = arguments(0)
    sums = spmd.shard_map(lambda c, x: spmd.collectives.psum(c * x, "data"), MESH, (P("data"), P("data")), P())

    def run(total: Any) -> Any:
        return lambda h, xs: spmd.scan(lambda c, x: (torch.tanh(0.1 * total(c, x) + c / 2), None), h, xs)[0].sum()

    def whole(c: Tensor, x: Tensor) -> Tensor:
        return (c * x).unflatten(0, (2, -1)).sum(0)

    total = lambda c, x: sums(c, x).sum()  # noqa: E731
    on_one = lambda c, x: whole(c, x).sum()  # noqa: E731
    specs = P("data"), P(None, "data")
    close(spmd.jit(run(total), specs, mesh=MESH)(h, xs), run(on_one)(h, xs))
    close(spmd.jit(torch.func.grad(run(total)), specs, mesh=MESH)(h, xs), torch.func.grad(run(on_one))(h, xs))


def test_shards_of_other_shapes_in_a_body() -> None:
    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    h, xs = torch.randn(5, 4), torch.randn(5, 5, 4)
    product_of_shards = spmd.shard_map(torch.mul, mesh, (P("data"), P("data")), P("data"))
    body = lambda f: lambda h, xs: spmd.scan(lambda c, x: (torch.tanh(f(c, x)) + c, None), h, xs)[0]  # noqa: E731
    close(spmd.jit(body(product_of_shards), (P("data"), P(None, "data")), mesh=mesh)(h, xs), body(torch.mul)(h, xs))


def test_random_numbers() -> None:
    def walk(h: Tensor) -> Any:
        return spmd.scan(lambda c, _: (c + torch.randn(4), torch.rand(())), h, length=4)

    h = torch.zeros(6, 4)
    torch.manual_seed(3)
    wanted = walk(h)
    torch.manual_seed(3)
    found = spmd.jit(walk, (P("data"),), mesh=MESH)(h)
    for x, y in zip(found, wanted, strict=True):
        close(x, y)


@pytest.mark.parametrize("transform", ["jvp", "grad_of_grad"])
def test_random_numbers_of_a_body_that_runs_again(transform: str) -> None:
    """A tangent, or a second derivative, of what was computed with other numbers would be wrong."""
    walk = lambda h: spmd.scan(lambda c, _: (torch.sin(c) * torch.rand(4, dtype=c.dtype), None), h, length=2)[0]  # noqa: E731
    again = TWICE[transform](walk)
    h = torch.ones(4, dtype=torch.float64)
    with pytest.raises(TraceError, match=r"draws random numbers, rand at .* runs it again.*rng=\"counter\""):
        spmd.jit(again, P("data"), mesh=MESH)(h)
    ratio = spmd.jit(lambda h: torch.stack(torch.func.jvp(walk, (h * 0 + 1e-8,), (h,))), mesh=MESH, rng="counter")(h)
    value, tangent = ratio.full_tensor()
    torch.testing.assert_close(value / 1e-8, tangent)


TWICE: dict[str, Callable[..., Any]] = {
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "grad_of_grad": lambda f: _gradient(lambda x: _gradient(f)(x).square().sum()),
    "jvp_of_grad": lambda f: lambda x: torch.func.jvp(_gradient(f), (x,), (x.cos(),))[1],
    "grad_of_jvp": lambda f: _gradient(lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1]),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).square().sum()),
}


def _gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    found: Callable[[Tensor], Tensor] = torch.func.grad(lambda x: function(x).square().sum())
    return found


def without_gradients(c: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sin(c)
    return c * scale + c.cos().detach()


def written(c: Tensor) -> Tensor:
    y = c * 2
    y[-3:] = c[:-1].sin()
    y[:1].zero_()
    return y * c.clone().copy_(y)


@pytest.mark.parametrize("transform", sample(TWICE, ["grad_of_grad", "jvp_of_grad"]))
@pytest.mark.parametrize("body", [without_gradients, written])
def test_second_derivatives_of_what_is_detached_or_written(body: Callable[[Tensor], Tensor], transform: str) -> None:
    loop = lambda x: spmd.scan(lambda c, _: (body(c), None), x, length=2)[0]  # noqa: E731
    side = lambda x: spmd.cond(x.sum() > 0, body, torch.cos, x)  # noqa: E731
    x = torch.arange(1.0, 5.0, dtype=torch.float64)
    for function in (loop, side):
        transformed = TWICE[transform](function)
        close(spmd.jit(transformed, P("data"), mesh=MESH)(x), transformed(x))


def written_without_gradients(c: Tensor) -> Tensor:
    y = c * c
    with torch.no_grad():
        y[:1] *= 3
    return y * c


def read_as_data(c: Tensor) -> Tensor:
    return c * c.data


def test_derivatives_that_a_body_has_outside_of_programs_only() -> None:
    x = torch.arange(1.0, 5.0, dtype=torch.float64)
    loop = lambda x: spmd.scan(lambda c, _: (written_without_gradients(c), None), x, length=2)[0]  # noqa: E731
    first = torch.func.grad(lambda x: loop(x).sum())
    close(spmd.jit(first, P("data"), mesh=MESH)(x), first(x))
    with pytest.raises(
        spmd.TraceError, match=r"second derivative .* is that of a write under torch.no_grad at .*\*= 3"
    ):
        spmd.jit(torch.func.grad(lambda x: first(x).sum()), P("data"), mesh=MESH)(x)
    other = lambda x: spmd.scan(lambda c, _: (read_as_data(c), None), x, length=2)[0].sum()  # noqa: E731
    close(spmd.jit(other, P("data"), mesh=MESH)(x), other(x))
    with pytest.raises(spmd.TraceError, match=r"x.data at .* Write x.detach\(\)"):
        spmd.jit(torch.func.grad(other), P("data"), mesh=MESH)(x)


@pytest.mark.parametrize("transform", ["grad of vmap", "vmap of grad", "jvp of vmap"])
def test_each_item_of_a_batch_has_the_derivative_of_its_own_side(transform: str) -> None:
    """That of the other one is infinite: JAX, which selects from both, has NaN."""
    side: Callable[..., Any] = lambda r: spmd.cond(r > 0, torch.sqrt, lambda r: r * 3, r)  # noqa: E731
    transforms: dict[str, Callable[[Tensor], Any]] = {
        "grad of vmap": torch.func.grad(lambda x: torch.vmap(side)(x).sum()),
        "vmap of grad": torch.vmap(torch.func.grad(side)),
        "jvp of vmap": lambda x: torch.func.jvp(torch.vmap(side), (x,), (torch.ones_like(x),))[1],
    }
    x = torch.tensor([0.0, 1.0, 4.0, 0.0])
    close(spmd.jit(transforms[transform], P("data"), mesh=MESH)(x), torch.tensor([3.0, 0.5, 0.25, 3.0]))


def test_tangents_of_tangents_after_other_programs() -> None:
    def loop(x: Tensor) -> Tensor:
        return spmd.scan(lambda c, r: (torch.sin(c * r), None), x, torch.stack([x.cos(), x]))[0]

    tangent: Callable[[Callable[..., Any]], Callable[..., Any]] = TWICE["jvp"]
    x = torch.arange(1.0, 5.0, dtype=torch.float64)
    for transform in (torch.vmap, torch.func.jacfwd, tangent, lambda f: tangent(tangent(f)), TWICE["hessian"]):
        transformed = transform(loop)
        close(spmd.jit(transformed, P("data"), mesh=MESH)(x), transformed(x))


def test_effects_run_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def body(c: Tensor, _: None) -> Any:
        spmd.debug.print("{}", c)
        return c * 2, None

    spmd.jit(lambda x: spmd.scan(body, x, length=3)[0], (P(),), mesh=spmd.make_mesh({"data": 1}))(torch.tensor(1))
    assert [line.split()[-1] for line in capfd.readouterr().out.split("\n") if line] == ["1", "2", "4"]


def test_checkpoints() -> None:
    h, xs, w = arguments(0)

    def inside(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        again = lambda c, x: checkpoint(lambda c, x: torch.tanh(c @ w + x).sin(), c, x, use_reentrant=False)  # noqa: E731
        return spmd.scan(lambda c, x: (again(c, x), None), h, xs)[0].sum()

    def around(h: Tensor, xs: Tensor, w: Tensor) -> Any:
        return checkpoint(loss, h, xs, w, use_reentrant=False)

    plain = lambda h, xs, w: spmd.scan(lambda c, x: (torch.tanh(c @ w + x).sin(), None), h, xs)[0].sum()  # noqa: E731
    for function, wanted in ((inside, plain), (around, loss)):
        close(spmd.jit(torch.func.grad(function, 2), SPECS, mesh=MESH)(h, xs, w), torch.func.grad(wanted, 2)(h, xs, w))


def test_gradients_in_a_body() -> None:
    def adapted(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
        def step(w: Tensor, x: Tensor) -> Any:
            return w - 0.1 * torch.func.grad(lambda w: torch.tanh(h @ w).square().sum() + (x * w.sum()).sum())(w), None

        return spmd.scan(step, w, xs)[0].sum()

    args = arguments(0)
    close(spmd.jit(torch.func.grad(adapted, 2), SPECS, mesh=MESH)(*args), torch.func.grad(adapted, 2)(*args))


class Rounded(torch.autograd.Function):
    """A rounded value, with another derivative than that of its operators, which is zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0] * 3


def rounded(h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
    c, sums = spmd.scan(lambda c, x: (torch.tanh(Rounded.apply(c @ w * 3) + x), c.mean()), h, xs)  # type: ignore[no-untyped-call]
    last = spmd.cond(c.sum() > 0, lambda: Rounded.apply(2 * c) * c, lambda: Rounded.apply(c) * c)  # type: ignore[no-untyped-call]
    return sums.sin().sum() + last.sum()  # type: ignore[no-any-return]


def by_autograd(function: Callable[..., Tensor], h: Tensor, xs: Tensor, w: Tensor) -> Tensor:
    w = w.clone().requires_grad_()
    return torch.autograd.grad(function(h, xs, w), w)[0]


def test_functions_in_a_body_have_their_own_derivatives() -> None:
    h, xs, w = arguments(0)
    gradient = torch.func.grad(rounded, 2)
    close(spmd.jit(gradient, SPECS, mesh=MESH)(h, xs, w), by_autograd(rounded, h, xs, w))
    close(torch.func.grad(spmd.jit(rounded, SPECS, mesh=MESH), 2)(h, xs, w), by_autograd(rounded, h, xs, w))
    both = lambda h, xs, w: torch.vmap(rounded, (0, None, None))(torch.stack([h, -h]), xs, w).sum()  # noqa: E731
    wanted = by_autograd(lambda h, xs, w: rounded(h, xs, w) + rounded(-h, xs, w), h, xs, w)
    close(spmd.jit(torch.func.grad(both, 2), SPECS, mesh=MESH)(h, xs, w), wanted)
    with pytest.raises(TraceError, match="Function Rounded"):
        second = torch.func.grad(lambda *args: gradient(*args).sum(), 2)
        spmd.jit(second, SPECS, mesh=MESH)(h, xs, w)


@pytest.mark.parametrize("transform", sample(TRANSFORMS, ["value", "jvp", "grad_of_grad", "vmap_of_grad"]))
def test_constraints_in_a_body(transform: str) -> None:
    def constrained(h: Tensor, xs: Tensor, w: Tensor) -> Any:
        return spmd.scan(lambda c, x: (spmd.constrain(torch.tanh(c @ w + x), P(None, "model")), None), h, xs)[0]

    def plain(h: Tensor, xs: Tensor, w: Tensor) -> Any:
        return spmd.scan(lambda c, x: (torch.tanh(c @ w + x), None), h, xs)[0]

    args = arguments(0)
    found = spmd.jit(TRANSFORMS[transform](constrained), SPECS, mesh=MESH)(*args)
    for x, y in zip(tree_leaves(found), tree_leaves(TRANSFORMS[transform](plain)(*args)), strict=True):
        close(x, y)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "vmap_of_grad"])
def test_kernels_in_a_body_that_depend_on_transforms(transform: str) -> None:
    def attended(h: Tensor, xs: Tensor, w: Tensor) -> Any:
        def body(c: Tensor, x: Tensor) -> Any:
            return torch.tanh(F.scaled_dot_product_attention((c @ w)[None], x[None], x[None])[0]), None

        return spmd.scan(body, h, xs)[0]

    args = arguments(0)
    found = spmd.jit(TRANSFORMS[transform](attended), SPECS, mesh=MESH)(*args)
    for x, y in zip(tree_leaves(found), tree_leaves(TRANSFORMS[transform](attended)(*args)), strict=True):
        close(x, y)


def test_a_checkpointed_body_keeps_little() -> None:
    def deep(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.sin(torch.cos(c @ w + x) @ w) @ w)

    def stacks(body: Callable[..., Tensor]) -> int:
        run = lambda h, xs, w: spmd.scan(lambda c, x: (body(c, x, w), None), h, xs)[0].sum()  # noqa: E731
        return spmd.jit(torch.func.grad(run, 2), SPECS, mesh=MESH).lower(*arguments(0)).as_text().count(".append(")

    again = lambda c, x, w: checkpoint(deep, c, x, w, use_reentrant=False)  # noqa: E731
    assert stacks(again) == 2 < stacks(deep)


def test_text() -> None:
    h, xs, w = arguments(0)
    text = spmd.jit(branch_in_loop, (P("model"), P(), P()), mesh=MESH).lower(h, xs, w).as_text()
    lines = [line.partition("  # ")[0] for line in text.splitlines()]
    start = lines.index("    for loop_1 in range(5):")
    inside = [line for line in lines[start + 1 :] if line.startswith("        ")]
    assert inside[0] == "        item_1 = xs[loop_1]"
    assert any(re_line.startswith("        if ") for re_line in inside)
    assert "        else:" in inside
    assert inside[-1].startswith("        carry_1 = ")
    assert "    stack_1 = torch.stack(stack_1)" in lines


def test_what_a_body_reads_is_moved_once() -> None:
    """A weight is gathered before the loop, and the sum of its gradient is sent behind that of the backward pass."""
    h, xs, w = arguments(0)
    specs = P("data"), P(None, "data"), P()
    step = spmd.jit(torch.func.grad(lambda *args: rnn(*args)[0].sum(), 2), specs, P(), mesh=MESH)
    assert [(comm.kind, comm.times) for comm in step.plan(h, xs, w).comms] == [("all_reduce", 1)]


def test_collectives_of_a_body_count_every_trip() -> None:
    h, xs, w = arguments(0)
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    step = spmd.jit(rnn, (P("data"), P(None, "data"), P()), (P(), P()), mesh=mesh)
    constrained = spmd.jit(
        lambda h, xs: spmd.scan(lambda c, x: (spmd.constrain(spmd.constrain(c, P("data")) + x, P()), None), h, xs)[0],
        (P(), P(None, "data")),
        mesh=mesh,
    )
    assert all(comm.times == 1 for comm in step.plan(h, xs, w).comms)
    (comm,) = constrained.plan(h, xs).comms
    assert (comm.kind, comm.times, comm.bytes) == ("all_gather", 5, 5 * h.nbytes / 2)
    with spmd.comms_of() as sent:
        constrained(h, xs)
    assert sum(one.bytes for one in sent.comms) == comm.bytes


def test_reverse_mode_of_a_while_loop_is_refused() -> None:
    args = arguments(0)
    with pytest.raises(TraceError, match=r"fori_loop.*spmd\.scan"):
        spmd.jit(torch.func.grad(newton, 1), SPECS, mesh=MESH)(*args)


def test_saved_plans(tmp_path: Any) -> None:
    args = arguments(0)
    step = spmd.jit(loss, SPECS, mesh=MESH)
    step.plan(*args).save(tmp_path / "plan.json")
    close(spmd.jit(loss, SPECS, mesh=MESH, plan=tmp_path / "plan.json")(*args), loss(*args))


def same(function: Callable[..., Any], *args: Tensor) -> None:
    """Compare a function inside of jit, of shards over two ranks, with itself on one device."""
    step: Any = spmd.jit(function, P("data"), P(), mesh=MESH)
    found, wanted = tree_leaves(step(*args)), tree_leaves(function(*args))
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        close(x, y)


def test_two_carries_that_are_one_value() -> None:
    def twice(x: Tensor) -> Any:
        first, second = spmd.fori_loop(0, 2, lambda i, pair: (pair[1], pair[1]), (x, x.sin()))
        return first.cos(), second.exp()

    same(twice, arguments(0)[0])


def test_branches_three_deep_close_over_tensors() -> None:
    def deep(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        inner = lambda: spmd.cond(x.sum() > y.sum(), lambda: x * y, lambda: y * z)  # noqa: E731
        middle = lambda: spmd.cond(x.sum() > z.sum(), lambda: z * z, inner)  # noqa: E731
        return spmd.cond(x.sum() > -100, middle, lambda: x * 2).sum()  # type: ignore[no-any-return]

    h = arguments(0)[0]
    for z in (h - 1, h + 1):
        same(torch.func.grad(deep, (0, 1, 2)), h, h.cos(), z)


def test_results_without_derivatives() -> None:
    def positive(h: Tensor, xs: Tensor) -> Tensor:
        rows = spmd.map(lambda x: x > 0, xs)
        any_of = spmd.cond(h.sum() > 0, lambda: rows.any(0), lambda: rows.all(0))
        return (h * any_of).sum()  # type: ignore[no-any-return]

    h, xs, _ = arguments(0)
    same(torch.func.grad(positive, (0, 1)), h, xs)
    same(lambda *args: torch.func.jvp(positive, args, args), h, xs)


def test_writes_to_results_that_a_derivative_reads() -> None:
    def written(h: Tensor, xs: Tensor) -> Tensor:
        carry, rows = spmd.scan(lambda c, x: (c * x, c.tanh()), h, xs)
        rows.mul_(2)
        return (carry + rows.sum(0)).sum()  # type: ignore[no-any-return]

    h, xs, _ = arguments(0)
    same(torch.func.grad(written, (0, 1)), h, xs)


def test_views_that_an_unrolled_body_writes_to() -> None:
    def body(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
        new = c * x
        new[0].neg_()
        return new[0].expand_as(c), None

    h, xs, _ = arguments(0)
    same(lambda h, xs: spmd.cond(h.sum() > -100, lambda: spmd.scan(body, h, xs, unroll=2)[0], lambda: h), h, xs)


TRANSFORMED: dict[str, Callable[..., Tensor]] = {
    "grad": lambda x, c: torch.func.grad(lambda t: (t.sin() * c).sum())(x),
    "vjp": lambda x, c: torch.func.vjp(lambda t: t.sin() * c, x)[1](x)[0],
    "jvp": lambda x, c: torch.func.jvp(lambda t: t.sin() * c, (x,), (x,))[1],
    "vmap": lambda x, c: torch.vmap(lambda t: t * c.sum())(x),
    "result of vmap": lambda x, c: torch.vmap(lambda t: x)(c)[0],
    "result of vjp": lambda x, c: torch.func.vjp(lambda t: (t * c, x), c)[0][1],
    "result of jvp": lambda x, c: torch.func.jvp(lambda t: x, (c,), (c,))[0],
}


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_a_body_transforms_what_is_around_it(transform: str) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        inner = lambda c: spmd.cond(c.sum() > 0, lambda: c + TRANSFORMED[transform](x, c), lambda: c * y)  # noqa: E731
        return spmd.fori_loop(0, 2, lambda i, c: inner(c) + TRANSFORMED[transform](y, c), x)  # type: ignore[no-any-return]

    h = arguments(0)[0]
    same(run, h, h.cos())
    gradient: Any = torch.func.grad(lambda *args: run(*args).sum(), (0, 1))
    same(torch.func.grad(lambda *args: sum(g.square().sum() for g in gradient(*args)), (0, 1)), h, h.cos())


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad, lambda f: torch.vmap(f, (None, 1))])
def test_no_trip(transform: Callable[..., Any]) -> None:
    def run(h: Tensor, xs: Tensor) -> Any:
        carry, sums = spmd.scan(lambda c, x: (c * x, c.sum()), h, xs)
        return (carry * h).sum() + sums.sum()

    h, xs, _ = arguments(0)
    step = spmd.jit(transform(run), (P("data"), P(None, None, "data")), P(), mesh=MESH)
    close(step(h, xs[:0]), transform(run)(h, xs[:0]))
    assert "range(" not in step.lower(h, xs[:0]).as_text()


def test_results_that_are_parts_of_what_a_loop_or_a_branch_begins_with() -> None:
    def parts(h: Tensor) -> Any:
        part = h.sin()[1:]
        above = (h.sum(1) > 0)[0]
        return (
            part,
            spmd.while_loop(lambda c: c.sum() > 1, torch.cos, part),
            above,
            spmd.cond(above, lambda: h, lambda: -h),
        )

    same(parts, arguments(0)[0])
