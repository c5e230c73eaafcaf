"""What functions under jit use of torch: checkpoints, backward passes, operators and autograd functions of others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import product
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves

pytestmark = pytest.mark.filterwarnings("ignore::spmd.api.programs.missing_rules.MissingRuleWarning")

MESHES = [{"data": 2}, {"data": 3}, {"data": 2, "model": 2}]
"""Even, uneven, and of two axes."""


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, W = randn(4, 6), randn(6, 6, seed=1)


def backward_of_an_argument(x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_()
    loss = (x @ w).sin().sum()
    loss.backward()
    return loss.detach(), x.grad


def backward_of_leaves(x: torch.Tensor, w: torch.Tensor) -> Any:
    leaf, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
    for factor in (1.0, 2.0):  # the second is added to the first
        ((leaf * factor) @ weight).tanh().sum().backward()
    return leaf.grad, weight.grad


def gradient_of_leaves(x: torch.Tensor, w: torch.Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    (first,) = torch.autograd.grad((leaf @ w).sin().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.cos().sum(), leaf)
    return first.detach(), second


def gradient_of_a_new_leaf(x: torch.Tensor, w: torch.Tensor) -> Any:
    leaf = torch.ones(6, dtype=torch.float64, requires_grad=True)
    torch.autograd.backward([(x * leaf).sum(), (leaf @ w).sin().sum()])
    return leaf.grad


def hooks(x: torch.Tensor, w: torch.Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    middle = leaf @ w
    middle.retain_grad()
    leaf.register_hook(lambda gradient: gradient * 2)
    middle.sin().sum().backward()
    return leaf.grad, middle.grad


@torch.library.custom_op("spmd_tests::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.sin() * scale


@scaled_sine.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


scaled_sine.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[0].cos() * ctx.scale, None), setup_context=_keep)


def custom_operators(x: torch.Tensor, w: torch.Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    loss = scaled_sine(leaf @ w, 0.5).sum()
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


class Third(torch.autograd.Function):
    """As other packages write them: one forward with ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, scale: float) -> Any:
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        largest = (x @ w).argmax(-1)
        ctx.mark_non_differentiable(largest)
        return x @ w * scale, largest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        _, w = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False, False)
        return gradient @ w.T * ctx.scale * 3, None, None


def functions_of_third_parties(x: torch.Tensor, w: torch.Tensor) -> Any:
    leaf = x.detach().requires_grad_()
    values, largest = Third.apply(leaf, w.detach(), 0.25)
    return largest, torch.autograd.grad(values.sin().sum(), leaf)[0]


class Random(torch.autograd.Function):
    """One that draws numbers, keeps them in its context, and has two results of which one is unused."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise, w)
        return (x * noise) @ w, x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        noise, w = ctx.saved_tensors
        return (gradient @ w.T) * noise * 2, None


OUTSIDE: dict[str, Callable[..., torch.Tensor]] = {
    "one result is an index": lambda x, w: Third.apply(x, w, 0.25)[0].sin().sum() * x.sum(),
    "random": lambda x, w: Random.apply(x, w)[0].sin().sum(),
    "custom operator": lambda x, w: scaled_sine(x @ w, 0.5).sum(),
}


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", OUTSIDE)
def test_functions_of_third_parties_are_differentiated_from_outside(name: str, axes: dict[str, int]) -> None:
    """Such functions have no setup_context, without which torch.func refuses them."""
    mesh = spmd.make_mesh(axes, runtime="virtual")
    alone, w = X.clone().requires_grad_(), W.clone()
    torch.manual_seed(3)
    expected = OUTSIDE[name](alone, w)
    expected.backward()
    leaf = spmd.distribute(X, P("data"), mesh).requires_grad_()
    jitted = spmd.jit(OUTSIDE[name], (P("data"), P()), mesh=mesh)
    for _ in range(2):
        torch.manual_seed(3)
        leaf.grad = None
        found = jitted(leaf, w)
        found.backward()
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
        torch.testing.assert_close(leaf.grad.full_tensor(), alone.grad)  # type: ignore[union-attr]


@torch.compile(backend="aot_eager")
def compiled(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2 + x).cos()


def nested_compile(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.func.grad_and_value(lambda x: compiled(x @ w).sum())(x)


def autocast_inside(x: torch.Tensor, w: torch.Tensor) -> Any:
    def loss(w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = x.float() @ w
            assert h.dtype is torch.bfloat16
            y = F.layer_norm(h, (6,))
        with torch.autocast("cpu", enabled=False):
            return (h.float() @ w).sin().mean() + y.float().sum()

    return torch.func.grad_and_value(loss)(w.float())


def is_compiling(x: torch.Tensor, w: torch.Tensor) -> Any:
    return x.sin() if torch.compiler.is_compiling() or not x.is_contiguous() else x.sin().clone()


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(4, 1, 6, 1).expand(4, 2, 6, 4)


def flex(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Forward only: torch has no gradient of flex_attention on the CPU; see `test_gradients_of_flex_attention`."""

    def score(value: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return value + w[q, k] * (h + 1)

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu")
    return flex_attention(heads(x), heads(x.sin()), heads(x.cos()), score_mod=score, block_mask=mask).sin()


FUNCTIONS: list[Callable[..., Any]] = [
    backward_of_an_argument,
    backward_of_leaves,
    gradient_of_leaves,
    gradient_of_a_new_leaf,
    hooks,
    custom_operators,
    functions_of_third_parties,
    nested_compile,
    autocast_inside,
    is_compiling,
    flex,
]


def alone(function: Callable[..., Any], *args: torch.Tensor) -> list[torch.Tensor]:
    """The results of one device, where torch.compile and flex_attention do not compile."""
    with torch.compiler.set_stance("force_eager"):
        return [leaf.detach() for leaf in tree_leaves(function(*(arg.clone() for arg in args)))]


def check(function: Callable[..., Any], mesh: spmd.Mesh, expected: list[torch.Tensor]) -> None:
    weight = P(None, mesh.names[-1]) if len(mesh.names) > 1 else P()
    found = spmd.jit(function, (P("data"), weight), mesh=mesh)(X, W)
    found = [leaf.full_tensor() for leaf in tree_leaves(found)]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if function is autocast_inside else {}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_values_of_one_device(function: Callable[..., Any], axes: dict[str, int]) -> None:
    check(function, spmd.make_mesh(axes, runtime="virtual"), alone(function, X, W))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_gradients_of_flex_attention(axes: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    """Those of the same attention by torch's other function: torch's own kernels have none on the CPU."""
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)

    def attend(q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        score = lambda value, b, h, i, j: value + slopes[h] * (i - j)  # noqa: E731
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")
        return flex_attention(q, k, k.sin(), score_mod=score, block_mask=mask)  # type: ignore[return-value]

    def plain(q: torch.Tensor, k: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        places = torch.arange(6)
        bias = slopes[:, None, None] * (places[:, None] - places)
        bias = bias.masked_fill(places[:, None] < places, -torch.inf)
        return F.scaled_dot_product_attention(q, k, k.sin(), bias)

    def loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args: function(*args).sin().sum()

    args = randn(5, 2, 6, 4), randn(5, 2, 6, 4, seed=1), slopes
    mesh, specs = spmd.make_mesh(axes, runtime="virtual"), (P("data"), P("data"), P())
    expected = torch.func.grad(loss(plain), argnums=(0, 1, 2))(*args)
    inside = spmd.jit(torch.func.grad(loss(attend), argnums=(0, 1, 2)), specs, mesh=mesh)(*args)
    leaves = [x.requires_grad_() for x in spmd.distribute(args, specs, mesh)]
    outside = torch.autograd.grad(spmd.jit(loss(attend), specs, mesh=mesh)(*leaves), leaves)
    for found in (inside, outside):
        torch.testing.assert_close([x.full_tensor() for x in found], list(expected))
    assert not caplog.records  # nothing is said of the torch.compile that is torch's own
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        attend(args[0].requires_grad_(), *args[1:])


def test_is_compiling_only_in_a_trace() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x

    spmd.jit(function, P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))(X)
    assert [True] == seen
    assert not torch.compiler.is_compiling()


def test_nested_compile_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    with caplog.at_level(logging.WARNING, logger="spmd"):
        for rows in (2, 4):
            spmd.jit(lambda x: compiled(x) + compiled(x), P("data"), mesh=mesh)(X[:rows])
    (record,) = caplog.records
    assert "torch.compile was called in one under spmd.jit at test_inside.py:" in record.getMessage()


def test_autocast_around() -> None:
    jitted = spmd.jit(torch.mm, (P("data"), P()), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = jitted(X.float(), W.float()).full_tensor()
    assert torch.bfloat16 is low.dtype
    assert torch.float32 is jitted(X.float(), W.float()).dtype
    torch.testing.assert_close(low, (X.bfloat16() @ W.bfloat16()), rtol=2e-2, atol=2e-2)


def test_a_tensor_may_be_asked_to_require_grad_that_does() -> None:
    """As transformers' hook for checkpoints does with embeddings."""
    mesh = spmd.make_mesh({"data": 2}, runtime="virtual")
    gradient = torch.func.grad(lambda x: (x * 2).requires_grad_(True).sin().sum())
    found = spmd.jit(gradient, P("data"), mesh=mesh)(X)
    torch.testing.assert_close(found.full_tensor(), 2 * (2 * X).cos())


@torch.library.custom_op("spmd_tests::writes", mutates_args=("outs",))
def writes(x: torch.Tensor, outs: list[torch.Tensor]) -> None:
    for out in outs:
        out.copy_(x.sin())


@torch.library.custom_op("spmd_tests::adds", mutates_args=("total", "count"))
def adds(x: torch.Tensor, total: torch.Tensor, count: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    total.add_(x, alpha=scale)
    count.add_(1)
    return x.sum(1)


@adds.register_fake
def _(x: torch.Tensor, total: torch.Tensor, count: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x.new_empty(x.shape[0])


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_custom_operator_may_write_to_tensors_of_the_function(axes: dict[str, int]) -> None:
    def function(x: torch.Tensor) -> Any:
        total, count = torch.zeros(8, 6, dtype=torch.float64), torch.tensor(0)
        first = adds(x, total[2:6], count, 0.5)  # through a view
        second = adds(x * 2, total[:4], scale=2.0, count=count)
        return total, count, first + second

    mesh = spmd.make_mesh(axes, runtime="virtual")
    found = spmd.jit(function, P("data"), mesh=mesh)(X)
    torch.testing.assert_close([x.full_tensor() for x in found], list(function(X)))
    with pytest.raises(spmd.TraceError, match=r"In-place write to argument 0 f64\[4,6\] at test_inside.py:\d+"):
        spmd.jit(lambda x: adds(x, x, torch.tensor(0)), mesh=mesh)(X)


LIBRARY = torch.library.Library("spmd_tests_library", "DEF")
LIBRARY.define("shapeless(Tensor x) -> Tensor")
LIBRARY.impl("shapeless", lambda x: x.sin(), "CPU")
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "writes": (
        lambda x: writes(x, [torch.empty_like(x)]),
        r"spmd_tests.writes.default at test_inside.py:\d+ .*mutates_args=\(\)",
    ),
    "no fake": (
        lambda x: torch.ops.spmd_tests_library.shapeless(x),
        r"shapeless.default at test_inside.py:\d+ .*@torch.library.register_fake\('spmd_tests_library::shapeless'\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_custom_operators_that_have_no_functional_form_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(spmd.TraceError, match=message):
        spmd.jit(function, P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))(X)


CLOSED = torch.ones(6, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    "function",
    [lambda x: (x * CLOSED).sum().backward(), lambda x: x.sum().backward()],
    ids=["closed over", "none"],
)
def test_backward_of_what_is_outside_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(spmd.TraceError, match=r"\.backward\(\) at test_inside.py:\d+ .*return x.grad"):
        spmd.jit(function, P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))(X)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh((x @ w).exp().sin()) @ w


def _runs(**options: Any) -> Callable[..., Any]:
    return lambda x, w: checkpoint(block, x, w, **options)


def _nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    two = lambda x: _runs(use_reentrant=False)(_runs(use_reentrant=False)(x, w), w)  # noqa: E731
    return checkpoint(two, x, use_reentrant=False)  # type: ignore[no-any-return]


def _selective() -> Any:
    saves = {torch.ops.aten.tanh.default: CheckpointPolicy.MUST_SAVE}
    return create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: saves.get(op, CheckpointPolicy.PREFER_RECOMPUTE)
    )


CHECKPOINTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "hooks": (_runs(use_reentrant=False), block),
    "reentrant": (_runs(use_reentrant=True), block),
    "selective": (_runs(use_reentrant=False, context_fn=_selective), block),
    "nested": (_nested, lambda x, w: block(block(x, w), w)),
}


def _training(layer: Callable[..., Any], by: str) -> Callable[..., Any]:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = layer(x, w)
        return (x * x).sum()

    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        if by == "func":
            return torch.func.grad_and_value(loss, argnums=(0, 1))(x, w)
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        value = loss(*leaves)
        if by == "grad":
            return torch.autograd.grad(value, leaves)
        value.backward()
        return leaves[0].grad, leaves[1].grad

    return step


@pytest.mark.parametrize(("name", "by", "axes"), product(CHECKPOINTS, ["func", "grad", "backward"], MESHES))
def test_checkpoints(name: str, by: str, axes: dict[str, int]) -> None:
    layer, plain = CHECKPOINTS[name]
    mesh = spmd.make_mesh(axes, runtime="virtual")
    check(_training(layer, by), mesh, alone(_training(plain, by), X, W))
    x, w = randn(256, 16), randn(16, 16) / 16
    jitted, held = (spmd.jit(_training(function, by), (P("data"), P()), mesh=mesh) for function in CHECKPOINTS[name])
    assert jitted.plan(x, w).memory.peak < held.plan(x, w).memory.peak
    exponentials = jitted.lower(x, w).as_text().count("= exp(")
    assert exponentials > held.lower(x, w).as_text().count("= exp(")


def test_checkpointed_dropout_draws_once() -> None:
    def step(x: torch.Tensor) -> Any:
        layer = lambda x: F.dropout(x.exp(), 0.5).sin()  # noqa: E731
        return torch.func.grad(lambda x: checkpoint(layer, x, use_reentrant=False).sum())(x)

    def plain(x: torch.Tensor) -> Any:
        return torch.func.grad(lambda x: F.dropout(x.exp(), 0.5).sin().sum())(x)

    torch.manual_seed(3)
    expected = plain(X)
    torch.manual_seed(3)
    found = spmd.jit(step, P("data"), mesh=spmd.make_mesh({"data": 2}, runtime="virtual"))(X)
    torch.testing.assert_close(found.full_tensor(), expected)
