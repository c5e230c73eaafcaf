"""`torch.autograd.Function`s without `setup_context`, and derivatives of custom operators, under torch.func inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

import spmd
from spmd import P

pytestmark = pytest.mark.filterwarnings("ignore::spmd.api.programs.missing_rules.MissingRuleWarning")

MESH = spmd.make_mesh({"x": 3}, runtime="virtual")
Function: Any = torch.autograd.Function


class Product(Function):
    """Saves arguments, and a number on the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, k: float = 2.0) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.k = k
        return x @ w * k

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = g @ w.T * ctx.k if ctx.needs_input_grad[0] else None
        return dx, x.T @ g * ctx.k if ctx.needs_input_grad[1] else None, None


class Exponential(Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.saved_tensors[0]


class Between(Function):
    """Saves what is neither an argument nor a result, also on the context and in a container, and None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        sine, cosine = x.sin(), x.cos()
        ctx.save_for_backward(cosine, None)
        ctx.parts = {"sine": [sine]}
        return sine * cosine

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        cosine, nothing = ctx.saved_tensors
        assert nothing is None
        return g * (cosine * cosine - ctx.parts["sine"][0] ** 2)


class Several(Function):
    """Several results, one of them without a derivative, one a number; gradients of others are zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        largest, rounded = x.clamp(max=1.0), x.round()
        ctx.mark_non_differentiable(rounded)
        ctx.save_for_backward(x <= 1.0)
        return largest, rounded, x * 3.0, 7

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert all(g is not None for g in gradients[:3])
        return gradients[0] * ctx.saved_tensors[0] + gradients[2] * 3.0


class Unmaterialized(Function):
    """Two results, of which the gradient of an unused one is None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2.0, x * 3.0

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
        return first * 2.0 if second is None else first * 100.0


class Written(Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(4.0)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 4.0


class Once(Function):
    """Refuses second derivatives, and calls another one in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2.0 * g * ctx.saved_tensors[0] + 0.0 * Exponential.apply(g)


class OnceWithSetup(Function):
    """The same with `setup_context`."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = staticmethod(Once.backward)


class Recomputing(Function):
    """Computes again in its backward pass, and takes the gradient of that, as checkpoints by hand do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp().sin()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x.exp().sin()
        return torch.autograd.grad(y, x, g)[0]


class Holding(Function):
    """Holds a graph of its own, and returns its argument, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = ctx.x.exp().sin()
        return ctx.y.detach(), x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(ctx.y, ctx.x, g)[0] + h


class Cast(Function):
    """Runs in half precision under autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2.0 * g * ctx.saved_tensors[0]


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return Cast.apply(x).sum().float()  # type: ignore[no-any-return]


X, W = torch.linspace(-2.0, 2.0, 20).view(5, 4), torch.linspace(-1.0, 1.0, 12).view(4, 3)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arguments": lambda x: Product.apply(x, W, 3.0).sin().sum(),
    "the same one twice": lambda x: Product.apply(Product.apply(x, x.T), x).square().sum(),
    "result": lambda x: Exponential.apply(x).square().sum(),
    "between": lambda x: (Between.apply(x) * x).sum(),
    "several": lambda x: (Several.apply(x)[0] * Several.apply(x)[1]).sum() * Several.apply(x)[3],
    "unmaterialized": lambda x: Unmaterialized.apply(x)[0].sin().sum(),
    "written": lambda x: Written.apply(x * 1.5).sin().sum(),
    "once": lambda x: Once.apply(x).sin().sum(),
    "once with setup_context": lambda x: OnceWithSetup.apply(x).sin().sum(),
    "recomputing": lambda x: Recomputing.apply(x).sin().sum(),
    "holding": lambda x: (Holding.apply(x)[0] * Holding.apply(x)[1]).sum(),
    "autocast": autocast,
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)


def by_autograd(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The gradient on one device, which torch.func refuses."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def jitted(function: Callable[..., Any], *args: torch.Tensor) -> torch.Tensor:
    return spmd.jit(function, P("x"), mesh=MESH)(*args).full_tensor()  # type: ignore[no-any-return]


@EACH
def test_gradients_are_those_of_one_device(name: str) -> None:
    function = FUNCTIONS[name]
    torch.testing.assert_close(jitted(torch.func.grad(function), X), by_autograd(function, X))
    value = jitted(lambda x: torch.func.grad_and_value(function)(x)[1][None], X)
    torch.testing.assert_close(value[0], function(X))


@EACH
def test_gradients_from_outside_are_those_of_one_device(name: str) -> None:
    function = FUNCTIONS[name]
    step = spmd.jit(function, P("x"), mesh=MESH)
    expected = by_autograd(function, X)
    torch.testing.assert_close(torch.func.grad(step)(X).full_tensor(), expected)
    leaf = spmd.distribute(X, P("x"), MESH).requires_grad_()
    step(leaf).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.full_tensor(), expected)


@EACH
def test_inside_of_shard_map(name: str) -> None:
    """Each rank has its own gradients."""
    body = torch.func.grad(FUNCTIONS[name])
    found = spmd.shard_map(body, MESH, P("x"), P("x"))(X)
    expected = torch.cat([by_autograd(FUNCTIONS[name], x) for x in X.chunk(3)])
    torch.testing.assert_close(found.full_tensor(), expected)


def twice(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.func.grad(lambda x: torch.func.grad(function)(x).sin().sum())


@pytest.mark.parametrize("name", ["arguments", "the same one twice", "result", "unmaterialized", "written"])
def test_second_derivatives_where_arguments_and_results_are_saved(name: str) -> None:
    x = X.clone().requires_grad_()
    first = torch.autograd.grad(FUNCTIONS[name](x), x, create_graph=True)[0]
    expected = torch.autograd.grad(first.sin().sum(), x)[0]
    torch.testing.assert_close(jitted(twice(FUNCTIONS[name]), X), expected)


def test_second_derivatives_that_would_be_wrong_are_refused() -> None:
    with pytest.raises(spmd.TraceError, match=r"Between, called at .* is differentiated twice, and saves"):
        jitted(twice(FUNCTIONS["between"]), X)
    for function in (FUNCTIONS["once"], lambda x: OnceWithSetup.apply(x).sin().sum()):
        with pytest.raises(spmd.TraceError, match=r"Once\w* is differentiated twice at .* once_differentiable"):
            jitted(twice(function), X)
    with pytest.raises(spmd.TraceError, match=r"Several, called at .* is differentiated in forward mode"):
        jitted(lambda x: torch.func.jvp(FUNCTIONS["several"], (x,), (x,))[1], X)
    with pytest.raises(spmd.TraceError, match=r"Exponential, called at .* is batched by vmap"):
        jitted(torch.func.vmap(FUNCTIONS["result"]), X)


def test_a_batch_that_does_not_reach_it() -> None:
    function = lambda x: torch.func.vmap(lambda row: row * Exponential.apply(x[0]).sum())(x).sum()  # noqa: E731
    expected = by_autograd(lambda x: (x * x[0].exp().sum()).sum(), X)
    torch.testing.assert_close(jitted(torch.func.grad(function), X), expected)


def test_outside_of_traces_torch_refuses_as_before() -> None:
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(FUNCTIONS["result"])(X)


@torch.library.custom_op("spmd_autograd_functions::weighted", mutates_args=())
def weighted(x: torch.Tensor, w: torch.Tensor, *, k: float = 1.0) -> torch.Tensor:
    return x * w * k


@torch.library.custom_op("spmd_autograd_functions::total", mutates_args=())
def total(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(xs).prod(0)


weighted.register_fake(lambda x, w, *, k=1.0: torch.empty_like(x))
total.register_fake(lambda xs: torch.empty_like(xs[0]))


def _save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.k = keyword_only_inputs["k"]


def _weighted_backward(ctx: Any, g: torch.Tensor) -> Any:
    x, w = ctx.saved_tensors
    assert len(ctx.needs_input_grad) == 2
    return weighted(g, w, k=ctx.k), weighted(g, x, k=ctx.k)


def _total_backward(ctx: Any, g: torch.Tensor) -> Any:
    return [total([g, *(x for other, x in enumerate(ctx.xs) if other != n)]) for n in range(len(ctx.xs))]


def _save_list(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.xs = inputs[0]


weighted.register_autograd(_weighted_backward, setup_context=_save)
total.register_autograd(_total_backward, setup_context=_save_list)
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "weighted": (lambda x: weighted(x, x.sin(), k=3.0).sum(), lambda x: (x * x.sin() * 3.0).sum()),
    "total": (lambda x: total([x, x.sin(), x]).sum(), lambda x: (x * x.sin() * x).sum()),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_of_custom_operators(name: str) -> None:
    function, plain = OPERATORS[name]
    torch.testing.assert_close(jitted(torch.func.grad(function), X), torch.func.grad(plain)(X))
    torch.testing.assert_close(jitted(twice(function), X), twice(plain)(X))
    third = lambda f: torch.func.grad(lambda x: twice(f)(x).sin().sum())  # noqa: E731
    torch.testing.assert_close(jitted(third(function), X), third(plain)(X))
    found = torch.func.grad(spmd.jit(function, P("x"), mesh=MESH))(X)
    torch.testing.assert_close(found.full_tensor(), torch.func.grad(plain)(X))


def test_gradients_of_gradients_by_autograd_are_refused_under_one_grad() -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        y = Exponential.apply(x).sum()
        return torch.autograd.grad(y, x, create_graph=True)[0].square().sum()

    with pytest.raises(spmd.TraceError, match="Exponential is differentiated twice"):
        jitted(torch.func.grad(penalty), X)


def test_jacobians_are_those_of_one_device() -> None:
    expected = torch.func.jacrev(lambda x: x.exp().sum(0))(X)
    torch.testing.assert_close(jitted(torch.func.jacrev(lambda x: Exponential.apply(x).sum(0)), X), expected)
