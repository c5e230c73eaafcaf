"""A user's operator from one factor pattern: values, gradients and batches as of the same function in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optree import tree_leaves
from torch import Tensor

import spmd
from spmd import P
from spmd.errors import RuleError
from spmd.rules import RULES, CustomOperator, custom_operator, linear
from spmd.testing.rule_check import check_rule


def plain(x: Tensor, w: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """A product and the largest elements of the rows, which take no part in it."""
    product = scale * (x @ w.T)
    return product if bias is None else product + bias[:, None], x.amax(1)


@torch.library.custom_op("test_custom::product", mutates_args=())
def product(x: Tensor, w: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return plain(x, w, bias, scale)


@product.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w.shape[0]), x.new_empty(x.shape[0])


@torch.library.custom_op("test_custom::product_backward", mutates_args=())
def product_backward(
    grad: Tensor, grad_max: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    largest = torch.zeros_like(x).scatter(1, x.argmax(1, keepdim=True), grad_max[:, None])
    return scale * (grad @ w) + largest, scale * (grad.T @ x)


@product_backward.register_fake
def _(grad: Tensor, grad_max: Tensor, x: Tensor, w: Tensor, bias: Any, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


PRODUCT = custom_operator(
    product, "b i, o i, b -> b o, b", linear("w bias:0"), replicate="i", independent="o", backward=product_backward
)  # `i` is summed in the one result and searched in the other


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


X, W, BIAS = draw(5, 4), draw(3, 4), draw(5)
MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def assert_same(expected: Any, actual: Any) -> None:
    for wanted, given in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        torch.testing.assert_close(given.full_tensor() if hasattr(given, "full_tensor") else given, wanted)


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of all results, weighted unequally, for `x` and `w`."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        first, second = function(x, w, None, 0.5)
        return first.square().sum() + 3 * second.square().sum()

    return torch.func.grad(loss, argnums=(0, 1))


def values(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: function(x, w, BIAS, 0.5)


@pytest.mark.parametrize("make", [values, gradients])
@pytest.mark.parametrize("specs", [(P("x"), P("y")), (P(("x", "y")), P()), (P(None, "x"), P("y", "x"))], ids=str)
def test_sharded(make: Callable[..., Any], specs: tuple[P, P]) -> None:
    jitted = spmd.jit(make(PRODUCT), specs, P(), mesh=MESH, rules=RULES | PRODUCT.rules)
    assert_same(make(plain)(X, W), jitted(X, W))


def test_cuts_are_used() -> None:
    """Rows over one axis and columns over the other: gradients need one all-reduce each, values nothing."""
    out = (P("x", "y"), P("x"))
    jitted = spmd.jit(values(PRODUCT), (P("x"), P("y")), out, mesh=MESH, rules=RULES | PRODUCT.rules)
    assert () == jitted.plan(X, W).comms


@pytest.mark.parametrize("make", [values, gradients])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 2)], ids=str)
@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit"])
def test_batched(make: Callable[..., Any], in_dims: tuple[int | None, int | None], jit: bool) -> None:
    """Over `x` alone, batches fold into rows; over `w` alone into columns, but not of the maxima: they loop."""
    x, w = (t if dim is None else draw(6, *t.shape).movedim(0, dim) for t, dim in zip((X, W), in_dims, strict=True))
    expected = torch.func.vmap(make(plain), in_dims)(x, w)
    batched = torch.func.vmap(make(PRODUCT), in_dims)
    if jit:
        batched = spmd.jit(batched, (P("x"), P("x")), P(), mesh=MESH, rules=RULES | PRODUCT.rules)
    assert_same(expected, batched(x, w))


def test_folded_batches_are_one_call() -> None:
    traced = spmd.jit(torch.func.vmap(lambda x: PRODUCT(x, W, None, 0.5)), P(), P(), mesh=MESH).trace(draw(6, 5, 4))
    calls = [operation for operation in traced.graph.operations if operation.op is PRODUCT.op]
    assert [(30, 4)] == [operation.operands[0].meta.shape for operation in calls]


@pytest.mark.parametrize("bias", [None, BIAS], ids=["without", "with"])
def test_both_rules_are_proved(bias: Tensor | None) -> None:
    assert PRODUCT.gradient is not None
    forward, backward = (X, W, bias, 0.5), (draw(5, 3), draw(5), X, W, bias, 0.5)
    for operator, args in ((PRODUCT, forward), (PRODUCT.gradient, backward)):
        report = check_rule(operator.op, operator.rule, [(args, {})], missing=False)
        assert () == report.wrong and report.passed >= 6, str(report)


def test_sums_leave_partial_results() -> None:
    """The same operator, of which only the sum is asked for."""
    summed = custom_operator(torch.ops.aten.mm, "b i, i o -> b o", sum="i")
    report = check_rule(summed.op, summed.rule, [((X, W.T.contiguous()), {})], missing=False)
    assert ((), 8) == (report.wrong, report.passed)
    assert summed.gradient is None and {summed.op} == summed.rules.keys()


def test_without_a_gradient() -> None:
    mine = CustomOperator(PRODUCT.op, PRODUCT.pattern, PRODUCT.rule, PRODUCT.tied)
    with pytest.raises(RuleError, match=r"test_custom.product.default has no gradient. Pass backward="):
        gradients(mine)(X, W)


def test_a_gradient_of_other_tensors() -> None:
    with pytest.raises(RuleError, match=r"takes 5 tensors and gives 2; a gradient of 'b i, o i -> b o' takes 3"):
        custom_operator(product, "b i, o i -> b o", sum="i", backward=product_backward)


def test_no_operator() -> None:
    with pytest.raises(RuleError, match=r"must come from torch.library.custom_op or torch.ops \(got <function plain"):
        custom_operator(plain, "b i, o i -> b o")
