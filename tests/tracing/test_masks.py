"""Reads and writes where masks say, on every placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling import product

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves

FOUR = torch.tensor([True, False, True, True])
THREE = torch.tensor([0, 2, 1])
ROWS = torch.arange(18.0).reshape(3, 6)


def write(index: Callable[[torch.Tensor], Any], value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[index(x)] = value(x) if callable(value) else value
        return y

    return function


def put(index: Callable[[torch.Tensor], Any], value: torch.Tensor, *, accumulate: bool = True) -> Any:
    return lambda x: x.index_put(index(x), value, accumulate)


def through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 1:][x[:, 1:] > 0] = 0.0
    return y


def of_a_sum(x: torch.Tensor) -> torch.Tensor:
    y = x @ x.mT
    y[y > 0.3] = 0.125
    return y


CASES = {
    "all dims": write(lambda x: x > 0.3, 0.125),
    "a 0-d tensor": write(lambda x: x > 0.3, torch.tensor(0.5)),
    "one element": write(lambda x: x > 0.3, torch.ones(1)),
    "an integer tensor": lambda x: write(lambda y: y > 1, 0.5)((x * 3).long()),
    "the first dim": write(lambda x: x.sum((1, 2)) > 0, 2.0),
    "rows of the first dim": write(lambda x: x.sum((1, 2)) > 0, ROWS),
    "lines of the first dim": write(lambda x: x.sum((1, 2)) > 0, torch.arange(6.0)),
    "two dims": write(lambda x: x.sum(2) > 0, torch.arange(6.0)),
    "the middle dim": write(lambda x: (slice(None), x.sum((0, 2)) > 0), 1.0),
    "lines of the middle dim": write(lambda x: (slice(None), x.sum((0, 2)) > 0), torch.arange(6.0)),
    "the last dim": write(lambda x: (..., x.sum((0, 1)) > 0), 1.0),
    "columns of the last dim": write(lambda x: (..., x.sum((0, 1)) > 0), torch.arange(3.0)[:, None]),
    "a number of dim 0": write(lambda x: (2, x[2] > 0), 1.0),
    "a part of dim 0": write(lambda x: (slice(1, 3), x[0] > 0), 1.0),
    "a value for each place": write(lambda x: FOUR, torch.arange(54.0).reshape(3, 3, 6)),
    "two masks": write(lambda x: (FOUR, torch.tensor([True, True, True])), 3.0),
    "positions and a mask": write(lambda x: (THREE, torch.tensor([True, True, True])), ROWS),
    "positions apart from a mask": write(lambda x: (FOUR, slice(None), THREE), torch.arange(9.0).reshape(3, 3)),
    "broadcast positions and a mask": write(lambda x: (FOUR, THREE[:, None]), torch.arange(6.0)),
    "added": put(lambda x: (x > 0.3,), torch.tensor(0.125)),
    "added to lines": put(lambda x: (x.sum(2) > 0,), torch.arange(6.0)),
    "added, a value for each place": put(lambda x: (FOUR,), torch.arange(54.0).reshape(3, 3, 6)),
    "a mask of no dim": write(lambda x: x.sum() < 1e9, 1.0),
    "a mask of no dim that is not set": write(lambda x: (slice(None), 1, x.sum() > 1e9), torch.ones(1)),
    "nowhere": write(lambda x: x > 1e9, 1.0),
    "through a view": through_a_view,
    "a product": of_a_sum,
    "masked_fill": lambda x: x.masked_fill(x[:1] > 0.3, 0.5),
    "masked_scatter": lambda x: x.masked_scatter(x > 0.3, torch.arange(72.0)),
    "masked_scatter of a broadcast mask": lambda x: x.masked_scatter(x[0] > 0.3, torch.arange(72.0)),
    "gradient": torch.func.grad(lambda x: write(lambda y: y > 0.3, 0.125)(x).square().sum()),
    "gradient of the value": torch.func.grad(lambda x: write(lambda y: y > 0.3, lambda y: y.sum())(x).square().sum()),
    "gradient of masked_scatter": torch.func.grad(lambda x: x.masked_scatter(x > 0.3, x.exp()).square().sum()),
    "tangent": lambda x: torch.func.jvp(write(lambda y: y > 0.3, 0.125), (x,), (x,)),
}

SPECS = [P(), P("a"), P(None, "a"), P(None, None, "b"), P("a", "b"), P("b", None, "a"), P(partial={"a": "sum"})]


@pytest.mark.parametrize(("case", "spec"), product(CASES, SPECS))
def test_values(case: str, spec: P) -> None:
    mesh = spmd.make_mesh({"a": 2, "b": 2}, runtime="virtual")
    x = torch.randn(4, 3, 6)
    out = P() if spec.partial or case == "a product" else spec
    result = spmd.jit(CASES[case], (spec,), out, mesh=mesh)(x)
    for actual, expected in zip(tree_leaves(result), tree_leaves(CASES[case](x)), strict=True):
        torch.testing.assert_close(actual.full_tensor(), expected)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a")], ids=repr)
def test_a_mask_of_all_dims_needs_no_communication(spec: P) -> None:
    mesh = spmd.make_mesh({"a": 2}, runtime="virtual")
    for function in (CASES["all dims"], lambda x: x.index_put((x > 0.3,), x.new_full((), 2.0))):
        assert spmd.jit(function, (spec,), spec, mesh=mesh).lower(torch.ones(4, 6)).count() == {}


def test_a_batch_of_masks() -> None:
    """Torch's own vmap refuses it."""
    mesh = spmd.make_mesh({"a": 2}, runtime="virtual")
    function, x = write(lambda x: x > 0.3, 0.125), torch.randn(4, 6)
    result = spmd.jit(torch.func.vmap(function), (P(None, "a"),), P("a"), mesh=mesh)(x)
    assert torch.equal(result.full_tensor(), function(x))


@pytest.mark.parametrize(
    "function",
    [lambda x: x[x > 0], lambda x: write(lambda y: y > 0.3, lambda y: y[y > 0.3])(x), lambda x: x.masked_select(x > 0)],
)
def test_what_has_as_many_elements_as_a_mask_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mesh = spmd.make_mesh({"a": 2}, runtime="virtual")
    with pytest.raises(spmd.TraceError, match=r"at test_masks.py:\d+ .* depends on the values"):
        spmd.jit(function, P(), P(), mesh=mesh)(torch.randn(4))


@pytest.mark.parametrize("function", [write(lambda x: (0, x > 0), 1.0)])
def test_masks_that_do_not_fit_are_refused_as_torch_does(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mesh = spmd.make_mesh({"a": 2}, runtime="virtual")
    with pytest.raises(IndexError, match=r"mask|too many indices"):
        spmd.jit(function, P(), P(), mesh=mesh)(torch.randn(4, 3))


@pytest.mark.parametrize(
    "function",
    [
        write(lambda x: x[:2] > 0, 1.0),
        write(lambda x: x[:2] > 0, lambda x: x.sum()),
        write(lambda x: (slice(None), x[0, :, :4] > 0), 1.0),
        put(lambda x: (x[:, :2].sum((0, 2)) > 0,), torch.tensor(1.0)),
    ],
)
def test_a_mask_of_another_shape_is_refused_as_torch_refuses_it(function):
    x = torch.ones(4, 3, 6)
    with pytest.raises(IndexError) as expected:
        function(x)
    with pytest.raises(IndexError) as actual:
        spmd.jit(function, P("a"), P("a"), mesh=spmd.make_mesh({"a": 2}, runtime="virtual"))(x)
    assert f"{expected.value}".split(" at index")[0] == f"{actual.value}".split(" at index")[0]
