"""Bodies of shard_map that run both compiled and under `spmd.disable_jit`, on any runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import optree
import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
)
from spmd.core.mesh import Mesh
from spmd.errors import DivergenceError, SpmdError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@attrs.frozen(eq=False)
class Case:
    """A body on a mesh with axes x and y, its specs, and its arguments."""

    body: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    args: tuple[torch.Tensor, ...]
    axis_names: frozenset[str] | None = None
    check: bool = True

    def mapped(self, mesh: Mesh) -> Any:
        return spmd.shard_map(
            self.body, mesh, self.in_specs, self.out_specs, axis_names=self.axis_names, check=self.check
        )


X, W, V = normal(8, 4), normal(4, 4, seed=1), normal(4, seed=2)


def grad_of(loss: Callable[..., torch.Tensor], *numbers: int) -> Callable[..., Any]:
    return torch.func.grad_and_value(loss, numbers or 0)


def mixed_types(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The gradient of w is summed over x, because w is cast to varying."""
    return psum(torch.tanh(a @ w).square().sum(), ("x", "y"))


def megatron(a: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return psum(F.gelu(a @ up) @ down, "y").square().sum()


def in_place(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Writes into new tensors, through views, and reads what was written."""
    out = torch.zeros_like(a)
    out[0] = v * 2
    out[1:].copy_(a[1:])
    row = out.view(-1)[:2]
    row.add_(a[0, 0]).mul_(3)
    out[:, 1] += 1
    out[:, 2] = 0.5
    return psum((out * v).sum(), "x")


def through_autograd(a: torch.Tensor, v: torch.Tensor) -> Any:
    leaf = v.detach().clone().requires_grad_()
    loss = psum((a * leaf).sin().sum(), "x")
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


class Scaled(torch.autograd.Function):
    """A function whose derivative calls a collective."""

    @staticmethod
    def forward(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return a * v

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        a, v = ctx.saved_tensors
        return g * v, g * a * psum(torch.ones(()), "x")


def every_gather(a: torch.Tensor) -> torch.Tensor:
    varying = all_gather(a, "x", tiled=True)
    invariant = all_gather(a.sin(), "x", tiled=True, to="invariant")
    reduced = all_gather(a.cos(), "x", tiled=True, to="reduced")
    return psum((varying * invariant * reduced).sum(), "x")


def every_scatter(a: torch.Tensor) -> torch.Tensor:
    whole = all_gather(a, "x", tiled=True)
    summand = pcast(whole.square(), "x", to="unreduced")
    return psum((psum_scatter(whole, "x", tiled=True) * psum_scatter(summand * 2, "x", tiled=True)).sum(), "x")


def moves(a: torch.Tensor) -> torch.Tensor:
    turned = ppermute(a, "x", [(0, 1), (1, 0)])
    swapped = all_to_all(a, "x", 1, 0, tiled=True)
    return psum((turned * a).sum() + (swapped.sum(1) * axis_index("x")).sum(), "x")


def extremes(a: torch.Tensor) -> torch.Tensor:
    return (pmax(a, "x") * pmin(a, "x")).sum() + pmean(a.square().sum(), "x")


def reduced_weights(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda r: psum((a @ r).square().sum(), "x"))(pcast(w, "x", to="reduced"))


def nested(a: torch.Tensor) -> torch.Tensor:
    def inner(b: torch.Tensor) -> torch.Tensor:
        return b * axis_index("y") + psum(b.sum(), "y")

    columns = spmd.shard_map(inner, None, P(None, "y"), P(None, "y"), axis_names={"y"})
    return torch.func.grad(lambda a: psum(columns(a).square().sum(), "x"))(a) + axis_index("x")


def per_sample(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.grad(lambda row, v: psum((row * v).sin().sum(), "x"), 1), (0, None))(a, v)


def jitted_inside(a: torch.Tensor) -> torch.Tensor:
    step = spmd.jit(lambda a: spmd.constrain(a.sin(), P()) * 2, P(), P())
    return psum(step(a), "x")


CASES: dict[str, Case] = {
    "mixed types": Case(grad_of(mixed_types, 0, 1), (P("x"), P(None, "y")), ((P("x"), P(None, "y")), P()), (X, W)),
    "megatron": Case(
        grad_of(megatron, 0, 1, 2),
        (P(), P(None, "y"), P("y")),
        ((P(), P(None, "y"), P("y")), P()),
        (X, normal(4, 6), normal(6, 4)),
    ),
    "writes": Case(grad_of(in_place, 0, 1), (P("x"), P()), ((P("x"), P()), P()), (X, V)),
    "autograd": Case(through_autograd, (P("x"), P()), (P(), P()), (X, V)),
    "Function": Case(
        grad_of(lambda a, v: psum(Scaled.apply(a, v).sin().sum(), "x"), 0, 1),
        (P("x"), P()),
        ((P("x"), P()), P()),
        (X, V),
        check=False,
    ),
    "gathers": Case(grad_of(every_gather), P("x"), (P("x"), P()), (X,)),
    "scatters": Case(grad_of(every_scatter), P("x"), (P("x"), P()), (X,)),
    "moves": Case(grad_of(moves), P("x"), (P("x"), P()), (X,)),
    "extremes": Case(grad_of(extremes), P("x"), (P("x"), P()), (X,)),
    "second order": Case(torch.func.hessian(lambda v, a: psum((a * v).sin().sum(), "x")), (P(), P("x")), P(), (V, X)),
    "forward mode": Case(
        lambda v, a: torch.func.jvp(lambda v: psum((a * v).sin(), "x"), (v,), (v,)), (P(), P("x")), P(), (V, X)
    ),
    "reduced": Case(reduced_weights, (P("x"), P()), P(partial={"x": "sum"}), (X, W)),
    "unreduced in": Case(lambda a: psum(a * 2, "x"), P(partial={"x": "sum"}), P(), (X,)),
    "first rank": Case(lambda a: a.sum(0), P("x"), P(), (X,), check=False),
    "uneven": Case(
        grad_of(lambda a: psum(a.sin().sum(), ("x", "y"))), P("x", "y"), (P("x", "y"), P()), (normal(5, 3),)
    ),
    "partly automatic": Case(
        grad_of(lambda a, w: psum((a @ w).sin().sum(), "x"), 1), (P("x"), P()), (P(), P()), (X, W), frozenset("x")
    ),
    "nested": Case(nested, P("x"), P("x"), (X,), frozenset("x")),
    "vmap": Case(per_sample, (P("x"), P()), P("x"), (X, V)),
    "closed over": Case(
        lambda a: torch.func.grad(lambda a: psum((a * V * V).sum(), "x"))(a) * V, P("x"), P("x"), (X,)
    ),
    "integers": Case(lambda a: psum(a > 0, ("x", "y")), P("x"), P(), (X,)),
    "jit inside": Case(jitted_inside, P("x"), P(), (X,)),
}  # fmt: skip


def compare(name: str, inside: bool, mesh: Mesh) -> None:
    """A case, alone or in a jitted function, with compilation and without."""
    case = CASES[name]
    function = case.mapped(mesh)
    if inside:
        function = spmd.jit(function, case.in_specs, case.out_specs, mesh=mesh)
    expected = function(*case.args)
    with spmd.disable_jit():
        found = function(*case.args)
    pairs = zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True)
    for mine, its in pairs:
        assert mine.spec == its.spec
        torch.testing.assert_close(mine.full_tensor(), its.full_tensor(), rtol=1e-5, atol=1e-6)


def transform_in_jit(mesh: Mesh) -> None:
    """A gradient around a shard_map'd function, in a jitted function; with other operators before and after."""
    layer = spmd.shard_map(lambda a, w: psum(torch.tanh(a @ w), "y"), mesh, (P("x"), P(None, "y")), P("x"))

    def step(a: torch.Tensor, w: torch.Tensor) -> Any:
        noise = torch.rand(a.shape)
        loss = lambda w: (layer(a + noise, w) * spmd.constrain(a[:, :2].sin(), P())).square().sum()  # noqa: E731
        return torch.func.grad_and_value(loss)(w), torch.rand(2)

    jitted = spmd.jit(step, (P("x"), P()), P(), mesh=mesh)
    torch.manual_seed(3)
    expected = optree.tree_leaves(jitted(X, W))
    torch.manual_seed(3)
    with spmd.disable_jit():
        found = optree.tree_leaves(jitted(X, W))
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), its.full_tensor(), rtol=1e-5, atol=1e-6)


def message(error: type[Exception], body: Callable[..., Any], mesh: Mesh) -> str:
    """The message of the error that a body raises on this rank."""
    mapped = spmd.shard_map(body, mesh, P("x"), P())
    try:
        with spmd.disable_jit():
            mapped(torch.arange(8.0))
    except error as found:
        return str(found)
    raise AssertionError("the body raised nothing")


def wrong_order(a: torch.Tensor) -> torch.Tensor:
    if int(axis_index("x")) == 1:
        return pmax(a, "x")
    return psum(a, "x")


def wrong_axes(a: torch.Tensor) -> torch.Tensor:
    return psum(pcast(a, "y"), "y" if int(axis_index("x")) else ("x", "y"))


def early_end(a: torch.Tensor) -> torch.Tensor:
    if int(axis_index("x")) == 1:
        return torch.zeros(())
    return psum(a.sum(), "x")


def divergence(mesh: Mesh) -> None:
    """Errors on all ranks that name two of them, what each calls, and the lines."""
    said = message(DivergenceError, wrong_order, mesh)
    assert "rank 0 calls all_reduce(op='sum', axes=['x']) at " in said and '`return psum(a, "x")`' in said
    assert "where rank 2 calls all_reduce(op='max', axes=['x']) at " in said and '`return pmax(a, "x")`' in said
    said = message(DivergenceError, wrong_axes, mesh)
    assert "rank 0 calls all_reduce(op='sum', axes=['x', 'y'])" in said
    assert "where rank 2 calls all_reduce(op='sum', axes=['y'])" in said
    said = message(DivergenceError, early_end, mesh)
    assert "rank 0 calls all_reduce(op='sum', axes=['x']) at " in said
    assert "where rank 2 ends the body of shard_map at " in said


def failing(a: torch.Tensor) -> torch.Tensor:
    total = psum(a, "x")
    if int(axis_index(("x", "y"))) == 3:
        raise ValueError("a mistake")
    return psum(total * a, "x")


def one_rank_fails(mesh: Mesh) -> None:
    """The rank that fails raises its error; where others are in other processes, they say which rank failed."""
    virtual = len(mesh.held_coordinates) > 1
    fails = virtual or mesh.held_coordinates == ((1, 1),)
    said = message(ValueError if fails else SpmdError, failing, mesh)
    assert said == "a mistake" if fails else "Rank 3 failed in" in said and "ValueError: a mistake" in said
    with spmd.disable_jit():  # all ranks can go on
        total = spmd.shard_map(lambda a: psum(a, "x"), mesh, P("x"), P())(torch.ones(2))
    torch.testing.assert_close(total.full_tensor(), torch.full((1,), 2.0))
