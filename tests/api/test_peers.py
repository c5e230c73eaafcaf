"""Programs that other systems of sharding have got wrong, forward and backward, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves

MESH = spmd.make_mesh({"x": 4}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
ROWS = (8, 5, 1)
"""Even, uneven with an empty shard, and one row over four ranks."""


def check(function: Callable[..., Any], *args: torch.Tensor, specs: Any, mesh: spmd.Mesh = MESH) -> None:
    """The function on shards gives what it gives on one device."""
    expected = tree_leaves(function(*args))
    given = tree_leaves(spmd.jit(function, specs, P(), mesh=mesh)(*args))
    for wanted, actual in zip(expected, given, strict=True):
        torch.testing.assert_close(actual.full_tensor(), wanted)


def with_gradient(loss: Callable[..., torch.Tensor], count: int = 1) -> Callable[..., Any]:
    return torch.func.grad_and_value(loss, argnums=tuple(range(count)))


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "l1": F.l1_loss,
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "soft_margin": lambda x, y: F.soft_margin_loss(x, y.sign().detach()),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_mean_losses_on_batch_shards(name: str, rows: int) -> None:
    x, y = torch.randn(2, rows, 6, dtype=torch.float64)
    check(with_gradient(LOSSES[name], 2), x, y, specs=(P("x"), P("x")))
    check(with_gradient(LOSSES[name], 2), x, y, specs=(P("x", "y"), P("x")), mesh=GRID)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "options",
    [
        {"weight": torch.arange(1.0, 8.0, dtype=torch.float64)},
        {"ignore_index": 2},
        {"label_smoothing": 0.2},
        {"weight": torch.arange(1.0, 8.0, dtype=torch.float64), "ignore_index": 2, "label_smoothing": 0.1},
        {"weight": torch.arange(1.0, 8.0, dtype=torch.float64), "reduction": "sum"},
    ],
    ids=lambda options: "-".join(options),
)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["batch", "classes"])
def test_cross_entropy(options: dict[str, Any], spec: P, rows: int) -> None:
    target = torch.tensor([2, 0, 6, 3, 2, 5, 1, 2])[-rows:] if rows > 1 else torch.tensor([3])
    loss = lambda scores, target: F.cross_entropy(scores, target, **options)  # noqa: E731
    check(with_gradient(loss), torch.randn(rows, 7, dtype=torch.float64), target, specs=(spec, P()))
    check(with_gradient(loss), torch.randn(rows, 7, dtype=torch.float64), target, specs=(P("x", "y"), P()), mesh=GRID)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["batch", "features"])
def test_cosine_embedding_loss(spec: P, rows: int) -> None:
    x, y = torch.randn(2, rows, 6, dtype=torch.float64)
    labels = torch.tensor([1, -1, 1, -1, -1, 1, 1, -1])[:rows]
    loss = lambda x, y, labels: F.cosine_embedding_loss(x, y, labels, margin=0.2)  # noqa: E731
    check(with_gradient(loss, 2), x, y, labels, specs=(spec, spec, P()))


@pytest.mark.parametrize("order", [torch.inf, -torch.inf, 1, 2, 0.5, 3])
def test_vector_norm_of_a_partial_maximum(order: float) -> None:
    """The rows' maxima are pending over `x` when their norm is taken: some lie below zero, so the order matters."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(spmd.constrain(x.amax(0), P(partial={"x": "max"})), order)

    x = torch.randn(8, 6, dtype=torch.float64) - 3
    plain = lambda x: torch.linalg.vector_norm(x.amax(0), order)  # noqa: E731
    sharded = spmd.jit(with_gradient(norm), P("x"), (P(), P()), mesh=MESH)(x)
    for wanted, given in zip(tree_leaves(with_gradient(plain)(x)), tree_leaves(sharded), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted)


@pytest.mark.parametrize("rows", [5, 4, 3, 1])
@pytest.mark.parametrize("function", [torch.argmax, torch.argmin])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_argmax_with_empty_shards(function: Callable[..., torch.Tensor], dim: int | None, rows: int) -> None:
    for x in (torch.randn(rows, 3), torch.zeros(rows, 3), torch.full((rows, 3), -torch.inf)):
        check(lambda x: function(x, dim), x, specs=P("x"))
        check(lambda x: function(x, dim, keepdim=True), x, specs=P("x", "y"), mesh=GRID)


@pytest.mark.parametrize("rows", [5, 1])
def test_extremes_of_a_sharded_dim_and_their_gradients(rows: int) -> None:
    x = torch.randn(rows, 6, dtype=torch.float64)
    check(lambda x: (*x.max(0), *x.min(0), *x.max(1, keepdim=True)), x, specs=P("x"))
    check(with_gradient(lambda x: (x.max(0).values * x.min(0).values).sum()), x, specs=P("x"))


def test_scans_of_a_sharded_dim_and_their_gradients() -> None:
    x = torch.rand(7, 3, dtype=torch.float64) + 0.5
    scans = lambda x: (x.cumsum(0), x.cumprod(0), x.logcumsumexp(0))  # noqa: E731
    check(scans, x, specs=P("x"))
    check(scans, x, specs=P(("y", "x")), mesh=GRID)
    check(with_gradient(lambda x: sum(scan.square().sum() for scan in scans(x))), x, specs=P("x"))


def test_multiple_of_a_partial_that_is_used_twice() -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> Any:
        product = x @ w  # pending over x: its terms are sums over shards
        scaled = product * 3
        return scaled + product, scaled * scaled, (scaled - product).exp()

    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    check(twice, x, w, specs=(P(None, "x"), P("x")))
    check(with_gradient(lambda x, w: sum(part.sum() for part in twice(x, w)), 2), x, w, specs=(P(None, "x"), P("x")))


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu6": lambda x: F.relu6(x * 4),
    "hardtanh": F.hardtanh,
    "hardswish": lambda x: F.hardswish(x * 3),
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3),
    "logsigmoid": F.logsigmoid,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "slice_scatter": lambda x: x.slice_scatter(x[:, :2] * 3, 1, 2, 4),
    "slice_scatter of rows": lambda x: x.slice_scatter(x[:2] * 3, 0, 3, 5),
    "select_scatter": lambda x: x.select_scatter(x[:, 0] * 3, 1, -2),
    "select_scatter of rows": lambda x: x.select_scatter(x[0] * 3, 0, 4),
    "select": lambda x: x[..., 2] * x[:, -1],
    "select of rows": lambda x: x[2] * x[-1],
    "diagonal": lambda x: x.diagonal(1) * x.diagonal(offset=-1, dim1=-1, dim2=0)[:5],
    "avg_pool": lambda x: F.avg_pool1d(x.view(1, 5, 6), 3, 2, 1),
    "avg_pool2d": lambda x: F.avg_pool2d(x.view(5, 1, 2, 3), 2, 1, 1, count_include_pad=False),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool1d(x.view(1, 5, 6), 4),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x.view(5, 1, 2, 3), (1, 2)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
def test_gradients(name: str, spec: P) -> None:
    function = ACTIVATIONS[name]
    x = torch.randn(5, 6, dtype=torch.float64)
    check(with_gradient(lambda x: (function(x) * (1 + function(x))).sum()), x, specs=spec)


@pytest.mark.parametrize("function", [F.silu, F.mish])
def test_gradients_that_torch_composes_of_others(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The pullback runs where nothing is differentiated: torch leaves its composition to whoever traces."""
    x, cotangent = torch.randn(2, 5, 6, dtype=torch.float64)
    pull = lambda x, cotangent: torch.func.vjp(function, x)[1](cotangent)  # noqa: E731
    check(pull, x, cotangent, specs=(P("x"), P(None, "x")))


@pytest.mark.parametrize("weights", [1, 6])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["rows", "columns"])
def test_prelu(weights: int, spec: P) -> None:
    x, w = torch.randn(5, 6, dtype=torch.float64), torch.rand(weights, dtype=torch.float64)
    check(with_gradient(lambda x, w: F.prelu(x, w).square().sum(), 2), x, w, specs=(spec, P()))


def test_view_of_an_empty_tensor() -> None:
    for spec in (P("x"), P(None, "x"), P(None, None, "x")):
        check(lambda x: x.view(4, 2, 0, 0, 0), torch.zeros(8, 0, 0), specs=spec)
        check(lambda x: x.reshape(0, 3).sum(0), torch.zeros(8, 0, 0), specs=spec)
