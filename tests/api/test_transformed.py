"""Transforms round a jitted function equal the same transforms of the function on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from sampling import product
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import spmd
from spmd import P
from spmd.api.jit import Jitted

MESH = spmd.make_mesh({"data": 2, "model": 3}, runtime="virtual")
X, W = torch.rand(5, 7, dtype=torch.float64), torch.rand(7, 4, dtype=torch.float64)
BATCH = torch.stack([W, W.cos(), W * 2])
IN_SPECS = [(P("data"), P(None, "model")), (P(), P()), (P("data", "model"), P("model")), (P(("model", "data")), P())]


def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.tanh(x @ w)
    return y.square().mean(), y


def whole(tree: Any) -> Any:
    return optree.tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, tree)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(whole(actual), expected)


def backward(f: Any, x: torch.Tensor, w: torch.Tensor, ws: torch.Tensor) -> Any:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    loss, y = f(x, w)
    assert loss.requires_grad and y.requires_grad
    loss.backward(retain_graph=True)
    (y * 2).sum().backward()
    return x.grad, w.grad


def linearized(f: Any, x: torch.Tensor, w: torch.Tensor, ws: torch.Tensor) -> Any:
    results, push = linearize(f, x, w)
    return results, push(x.cos(), w.sin()), push(x, w)


def create_graph(f: Any, x: torch.Tensor, w: torch.Tensor, ws: torch.Tensor) -> Any:
    w = w.detach().requires_grad_()
    (first,) = torch.autograd.grad(f(x, w)[0], w, create_graph=True)
    return torch.autograd.grad(first.square().sum(), w)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "backward": backward,
    "create_graph": create_graph,
    "grad": lambda f, x, w, ws: grad(lambda x, w: f(x, w)[0], argnums=(0, 1))(x, w),
    "grad and value": lambda f, x, w, ws: grad_and_value(lambda w: f(x, w), has_aux=True)(w),
    "vjp": lambda f, x, w, ws: vjp(lambda w: f(x, w)[1], w)[1](x @ w),
    "jvp": lambda f, x, w, ws: jvp(f, (x, w), (x.cos(), w.sin())),
    "jvp of one": lambda f, x, w, ws: jvp(lambda w: f(x, w), (w,), (w.sin(),)),
    "vmap": lambda f, x, w, ws: vmap(f, (None, 0))(x, ws),
    "vmap of vmap": lambda f, x, w, ws: vmap(lambda x: vmap(lambda w: f(x[None], w)[1])(ws))(x),
    "vmap of grad": lambda f, x, w, ws: vmap(grad(lambda w: f(x, w)[0]))(ws),
    "grad of vmap": lambda f, x, w, ws: grad(lambda ws: vmap(lambda w: f(x, w)[0])(ws).square().sum())(ws),
    "grad of grad": lambda f, x, w, ws: grad(lambda w: grad(lambda w: f(x, w)[0])(w).square().sum())(w),
    "jvp of grad": lambda f, x, w, ws: jvp(grad(lambda w: f(x, w)[0]), (w,), (w.cos(),)),
    "grad of jvp": lambda f, x, w, ws: grad(lambda w: jvp(lambda w: f(x, w)[0], (w,), (w.cos(),))[1])(w),
    "jacrev": lambda f, x, w, ws: jacrev(lambda w: f(x, w)[1])(w),
    "jacfwd": lambda f, x, w, ws: jacfwd(lambda w: f(x, w)[1])(w),
    "hessian": lambda f, x, w, ws: hessian(lambda w: f(x, w)[0])(w),
    "linearize": linearized,
    "vmap of linearize": lambda f, x, w, ws: vmap(linearize(lambda w: f(x, w)[1], w)[1])(ws),
}


@pytest.mark.parametrize(("name", "specs"), product(TRANSFORMS, IN_SPECS))
def test_transforms(name: str, specs: tuple[P, P]) -> None:
    x, w = spmd.distribute((X, W), specs, MESH)
    ws = spmd.distribute(BATCH, P(None, *specs[1].dims), MESH)
    jitted = spmd.jit(layer, specs, mesh=MESH)
    assert_same(TRANSFORMS[name](jitted, x, w, ws), TRANSFORMS[name](layer, X, W, BATCH))


@pytest.mark.parametrize("name", ["backward", "grad", "jvp", "vmap", "hessian", "linearize"])
def test_transforms_of_plain_tensors_and_given_specs(name: str) -> None:
    jitted = spmd.jit(layer, (P("data"), P(None, "model")), (P(), P(partial={"data": "sum"})), mesh=MESH)
    with spmd.implicit_replication():  # for the operators round the jitted function
        assert_same(TRANSFORMS[name](jitted, X, W, BATCH), TRANSFORMS[name](layer, X, W, BATCH))


def test_gradients_have_the_specs_of_the_arguments() -> None:
    specs = (P("data"), P(None, "model"))
    x, w = (value.requires_grad_() for value in spmd.distribute((X, W), specs, MESH))
    spmd.jit(layer, specs, mesh=MESH)(x, w)[0].backward()
    assert specs == (x.grad.spec.pspec, w.grad.spec.pspec)


def test_no_grad_runs_the_plain_program() -> None:
    w = spmd.distribute(W, P(), MESH).requires_grad_()
    jitted = spmd.jit(layer, (P("data"), P()), mesh=MESH)
    with torch.no_grad():
        assert not jitted(X, w)[0].requires_grad
    assert "flat" not in jitted.compile(X, w).__dict__


def test_a_batch_dim_that_is_sharded_stays_sharded() -> None:
    ws = spmd.distribute(BATCH, P("model"), MESH)
    jitted = spmd.jit(layer, (P("data"), P()), (P(), P("data")), mesh=MESH)
    _, y = vmap(jitted, (None, 0))(spmd.distribute(X, P("data"), MESH), ws)
    assert P("model", "data") == y.spec.pspec


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient is that of the identity."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent * 3


def test_gradients_of_the_users_own_functions() -> None:
    function = lambda x: (StraightThrough.apply(x * 2) * x).sum()  # type: ignore[no-untyped-call]  # noqa: E731
    jitted = spmd.jit(function, P("data"), mesh=MESH)
    x = spmd.distribute(X, P("data"), MESH)
    assert_same(grad(jitted)(x), grad(function)(X))
    assert_same(grad(lambda x: grad(jitted)(x).sin().sum())(x), grad(lambda x: grad(function)(x).sin().sum())(X))


def test_what_is_drawn_forward_is_kept_for_the_backward_pass() -> None:
    def noisy(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(x @ w, 0.4).relu() * torch.rand(5, 4)).sum()

    jitted = spmd.jit(noisy, (P("model"), P("data")), mesh=MESH)
    x, w = spmd.distribute((X, W), (P("data"), P("model")), MESH)
    torch.manual_seed(5)
    expected = grad(noisy)(W, X), torch.rand(2)
    torch.manual_seed(5)
    assert_same((grad(jitted)(w, x), torch.rand(2)), expected)
    for transform in (
        lambda f: lambda w, x: jvp(lambda w: f(w, x), (w,), (w,)),
        lambda f: lambda w, x: grad(lambda w: grad(f)(w, x).square().sum())(w),
        lambda f: lambda w, x: jvp(lambda w: grad(f)(w, x), (w,), (w,))[1],
    ):
        torch.manual_seed(6)
        wanted = transform(noisy)(W, X), torch.rand(2)
        torch.manual_seed(6)
        assert_same((transform(jitted)(w, x), torch.rand(2)), wanted)
    w.requires_grad_()
    torch.manual_seed(5)
    jitted(w, x).backward()
    assert_same(w.grad, expected[0])


def masked(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * torch.tensor([1.0, 2.0, 3.0])
    return (y * torch.rand_like(y) * x).sum(0), y.square()


@pytest.mark.parametrize("given", [(0,), (0, 1)])
def test_what_is_drawn_after_a_constant_is_kept_for_the_backward_pass(given: tuple[int, ...]) -> None:
    x = torch.rand(5, 3)
    placed = spmd.distribute(x, P("data"), MESH)
    jitted = spmd.jit(masked, P("data"), mesh=MESH)
    found = []
    for function, value in ((masked, x), (jitted, placed)):
        torch.manual_seed(0)
        found.append(grad(lambda x, f=function: sum(f(x)[n].sum() for n in given))(value))
    assert_same(found[1], found[0])


def test_operators_of_which_the_backward_pass_reads_one_result() -> None:
    """It makes the other one again."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        highest, at = torch.cummax(x, 0)
        chosen = highest[[0, -1]]
        return [at, *torch.aminmax(chosen - chosen, dim=-2)]

    x = torch.rand(1, 1)
    jitted = spmd.jit(function, P(), mesh=MESH)
    assert_same(*(grad(lambda x, f=f: sum(v.square().sum() for v in f(x)[1:]))(x) for f in (jitted, function)))


def test_arguments_that_cannot_be_differentiated() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.add(x, x, out=torch.empty_like(x)) @ w.sin()

    jitted = spmd.jit(function, (P("data"), P(None, "model")), mesh=MESH)
    x, w = spmd.distribute((X, W), (P("data"), P(None, "model")), MESH)
    assert_same(grad(lambda w: jitted(x, w).sum())(w), grad(lambda w: function(X, w).sum())(W))


def test_results_that_nobody_differentiates() -> None:
    """Cotangents that are missing are not zeros: the derivative of the square root of zero is infinite."""

    def function(x: torch.Tensor) -> Any:
        return x.square().sum(), x.sqrt(), (x > 0).sum(), x.argmax(0)

    jitted = spmd.jit(function, P("data"), mesh=MESH)
    x = spmd.distribute(torch.zeros(5, 3), P("data"), MESH).requires_grad_()
    results = jitted(x)
    assert [result.requires_grad for result in results] == [True, True, False, False]
    results[0].backward()
    assert_same(x.grad, torch.zeros(5, 3))


def test_an_argument_of_which_only_the_inner_gradient_is_taken() -> None:
    function = lambda a, w: (a * w).sin().square().sum()  # noqa: E731
    outer = lambda f: lambda a, w: torch.func.grad(lambda a: torch.func.grad(f, 1)(a, w).square().sum())(a)  # noqa: E731
    a, w = torch.arange(4.0), torch.arange(4.0).cos()
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    jitted = spmd.jit(function, (P("x"), P("x")), P(), mesh=mesh)
    placed = spmd.distribute((a, w), P("x"), mesh)
    torch.testing.assert_close(outer(jitted)(*placed).full_tensor(), outer(function)(a, w))


def test_integers_and_arguments_without_a_gradient() -> None:
    table, ids = torch.rand(6, 3), torch.tensor([1, 5, 1])
    lookup = lambda table, ids, scale: {"rows": F.embedding(ids, table) * scale}  # noqa: E731
    jitted = spmd.jit(lookup, (P("model"), P(), P()), mesh=MESH)
    placed = spmd.distribute(table, P("model"), MESH)
    expected = grad(lambda t: lookup(t, ids, torch.tensor(2.0))["rows"].sin().sum())(table)
    assert_same(grad(lambda t: jitted(t, ids, torch.tensor(2.0))["rows"].sin().sum())(placed), expected)


def two_layers(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (F.gelu(x @ params["up"]) @ params["down"]).square().mean()


STRATEGIES: dict[str, tuple[P, P]] = {
    "dp": (P(), P()),
    "fsdp": (P("data"), P("data")),
    "tp": (P(None, "model"), P("model")),
    "fsdp and tp": (P("data", "model"), P("model", "data")),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_forward_and_backward_send_what_one_program_sends(name: str) -> None:
    specs = dict(zip(("up", "down"), STRATEGIES[name], strict=True))
    mesh = spmd.make_mesh({"data": 4, "model": 2}, runtime="abstract")
    meta = lambda *shape: spmd.TensorMeta(shape, torch.float32)  # noqa: E731
    args = {"up": meta(1024, 4096), "down": meta(4096, 1024)}, meta(8192, 1024)
    together = spmd.jit(grad(two_layers), (specs, P("data")), specs, mesh=mesh).plan(*args)
    saving = spmd.jit(two_layers, (specs, P("data")), P(), mesh=mesh)._stages(args, {}).flat(()).saving((0, 1), ())
    sent = [sum(comm.bytes for comm in plan.comms) for plan in (saving.program.plan, together)]
    sent[0] += sum(comm.bytes for comm in saving.backward((0, 1), (0,), ()).program.plan.comms)
    assert sent[0] <= 1.1 * sent[1]


@pytest.mark.parametrize("name", STRATEGIES)
def test_layers_on_several_strategies(name: str) -> None:
    specs = dict(zip(("up", "down"), STRATEGIES[name], strict=True))
    params, x = {"up": torch.rand(7, 9), "down": torch.rand(9, 7)}, torch.rand(5, 7)
    jitted: Jitted = spmd.jit(two_layers, (specs, P("data")), P(), mesh=MESH)
    placed = spmd.distribute((params, x), (specs, P("data")), MESH)
    gradients = grad(jitted)(*placed)
    assert_same(gradients, grad(two_layers)(params, x))
    assert specs == {name: gradient.spec.pspec for name, gradient in gradients.items()}


def test_nothing_runs_twice() -> None:
    saving = spmd.jit(layer, (P("data"), P()), mesh=MESH).compile(X, W).flat(()).saving((0, 1), ())
    forward, backward = saving.program.local.graph(), saving.backward((1,), (0,), ()).program.local.graph()
    names = [[str(operation.op) for operation in graph.operations] for graph in (forward, backward)]
    assert "aten.tanh.default" in names[0] and "aten.tanh.default" not in names[1]
    assert (names[0] + names[1]).count("aten.mm.default") == 2


def test_programs_are_made_once() -> None:
    jitted = spmd.jit(layer, (P("data"), P()), mesh=MESH)
    x, w = spmd.distribute((X, W), (P("data"), P()), MESH)
    w.requires_grad_()
    for _ in range(3):
        jitted(x, w)[0].backward()
    saving = jitted.compile(x, w).flat(()).saving((1,), ())
    assert saving.backward.cache_info().misses == 1


def test_a_result_that_is_a_closed_over_tensor() -> None:
    constant = torch.arange(4.0, dtype=torch.float64)

    def function(x: torch.Tensor) -> Any:
        return (x * constant).sin(), constant

    jitted = spmd.jit(function, (P("data"),), mesh=MESH)
    total = lambda f: lambda x: f(x)[0].sum() + f(x)[1].sum()  # noqa: E731
    x = torch.rand(4, dtype=torch.float64)
    assert_same(grad(total(jitted))(spmd.distribute(x, P("data"), MESH)), grad(total(function))(x))
