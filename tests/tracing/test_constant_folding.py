"""Folding of tensors of one number: the same values from fewer operators."""

import pytest
import torch
from interpreter import evaluate

from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.canonicalize.constant_folding import fold_constants
from spmd.tracing.trace import trace

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def names(function, *args):
    """The operators of a function's canonical graph, whose value is the function's."""
    graph = canonicalize(trace(function, args).graph)
    (actual,) = evaluate(graph, args)
    assert torch.equal(function(*args), actual)
    return [operation.op.overloadpacket.__name__ for operation in graph.operations]


def test_the_gradient_of_a_mean_is_a_product_with_a_number():
    assert names(torch.func.grad(lambda x: (x * x).mean()), X) == ["mul", "add"]  # the two products are one


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + torch.full((4, 6), 2.0) * 3, ["add"]),
        (lambda x: torch.full((4, 6), 2.0) + x, ["add"]),
        (lambda x: torch.full((4, 6), 2.0) - x, ["full", "sub"]),
        (lambda x: x - torch.ones(6).expand(4, 6).sqrt(), ["sub"]),
        (lambda x: x / (torch.zeros(4, 6).exp() + 1), ["div"]),
        (lambda x: x**1 * torch.zeros(4, 6).exp() / 1, []),
        (lambda x: torch.add(torch.ones(4, 6), x, alpha=3), ["full", "add"]),
        (lambda x: torch.where(torch.ones(4, 6) > 0, x, 0.0), ["full", "full", "where"]),
        (lambda x: x[:1] + torch.ones(4, 6), ["slice", "full", "add"]),
        (lambda x: x + torch.ones(4, 6, dtype=torch.int64), ["full", "add"]),
        (lambda x: x.double() + torch.ones(4, 6), ["_to_copy", "full", "add"]),
    ],
)
def test_numbers_are_computed_while_tracing(function, expected):
    assert expected == names(function, X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.bool, torch.complex64])
def test_a_number_keeps_the_dtype_that_it_was_computed_in(dtype):
    def function(x):
        return torch.full((3,), 1, dtype=dtype).to(x.dtype) / 3 + x.sum() * 0

    graph = trace(function, (X,)).graph
    assert torch.equal(evaluate(graph, (X,))[0], evaluate(fold_constants(graph), (X,))[0])


def test_integer_division_rounds_as_the_operator_does():
    assert names(lambda x: x + torch.full((4, 6), -7).div(2, rounding_mode="floor"), X)[-1] == "add"
