"""Derivatives of loops and branches with respect to the operands that have gradients or tangents, beside one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop_cases import PLACES, TRANSFORMS, arguments
from torch import Tensor
from torch.utils._pytree import tree_leaves

import spmd
from spmd import P
from spmd.errors import TraceError

MEAN, VARIANCE = torch.full((4,), 0.1, dtype=torch.float64), torch.full((4,), 1.2, dtype=torch.float64)
TARGET = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")


def normalized(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.scan(lambda c, x: (torch.tanh(F.batch_norm(c @ w, MEAN, VARIANCE)) + x, None), h, xs)[0]


def statistics_carried(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def body(carry: Any, x: Tensor) -> Any:
        c, mean = carry
        y = c @ w
        return (torch.tanh(F.batch_norm(y, mean, VARIANCE)) + x, 0.9 * mean + 0.1 * y.detach().mean(0)), mean

    return spmd.scan(body, (h, MEAN), xs)


def losses(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    loss = lambda y: F.binary_cross_entropy(torch.sigmoid(y), TARGET.expand_as(y))  # noqa: E731
    return spmd.map(lambda x: loss(h @ w + x) + F.soft_margin_loss(h @ w, 2 * TARGET.expand_as(h) - 1), xs)


def chosen(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    return spmd.cond(h.sum() > -100, lambda: (F.batch_norm(h @ w, MEAN, VARIANCE), MEAN), lambda: (h, MEAN * 2))


def detached(h: Tensor, xs: Tensor, w: Tensor) -> Any:
    def body(carry: Any, x: Tensor) -> Any:
        a, b, c = carry
        return (torch.tanh(a @ w), a * x, (c + b).detach()), (c.sum(), b.mean())

    return spmd.scan(body, (h, xs[0], torch.zeros_like(h)), xs)


FAST = ((normalized, "jvp"), (statistics_carried, "grad"), (losses, "vmap_of_grad"), (chosen, "grad_of_grad"))
CASES = [
    pytest.param(function, transform, marks=() if (function, transform) in FAST else pytest.mark.slow)
    for function in (normalized, statistics_carried, losses, chosen, detached)
    for transform in ("grad", "grad_of_grad", "autograd_twice", "jvp", "jvp_of_grad", "vmap_of_grad")
    if (function, transform) != (losses, "jvp_of_grad")  # torch has no forward mode of soft_margin_loss_backward
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("function", "transform"), CASES)
def test_operands_without_gradients(function: Callable[..., Any], transform: str) -> None:
    args = arguments(0)
    found = tree_leaves(spmd.jit(TRANSFORMS[transform](function), PLACES[0][2], mesh=MESH)(*args))
    for x, y in zip(found, tree_leaves(TRANSFORMS[transform](function)(*args)), strict=True):
        torch.testing.assert_close(x.full_tensor(), y)


def test_operators_without_derivatives() -> None:
    """One that the user writes, and one of a derivative, which the program has only."""
    h, xs, w = arguments(0)

    def written(h: Tensor) -> Tensor:
        return spmd.fori_loop(0, 2, lambda i, c: torch.mul(c, c, out=torch.empty_like(h)), h)  # type: ignore[no-any-return]

    for function in (written, lambda h: TRANSFORMS["grad"](losses)(h, xs, w)[0]):
        moved = lambda h, function=function: torch.func.jvp(function, (h,), (h,))  # noqa: E731
        with pytest.raises(
            TraceError, match=r"test_operands_without_gradients\.py:\d+.*has no such derivative.*forward AD"
        ):
            spmd.jit(moved, P("data"), mesh=MESH)(h)


def test_a_weight_without_gradient_costs_nothing_backward() -> None:
    def loss(h: Tensor, w: Tensor, frozen: Tensor) -> Tensor:
        return spmd.scan(lambda c, _: (torch.tanh(c @ w) @ frozen, None), h, length=3)[0].sum()  # type: ignore[no-any-return]

    def products(argnums: Any) -> int:
        h, _, w = arguments(0)
        step = spmd.jit(torch.func.grad(loss, argnums), (P("data"), P(), P()), mesh=MESH)
        return step.lower(h, w, w).as_text().count(" mm(")

    assert (products((0, 1, 2)), products((0, 1)), products(2)) == (6, 5, 5)
