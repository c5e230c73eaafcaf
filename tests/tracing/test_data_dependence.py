"""What depends on the values of tensors is an error that names the operator, the line and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P, TraceError
from spmd.tracing.trace import trace

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
HERE = r"at test_data_dependence\.py:\d+"

SHAPES = {
    "aten.nonzero.default": (lambda x, i: x.nonzero(), r"torch\.nonzero_static\(x, size=\.\.\.\)"),
    "aten.masked_select.default": (lambda x, i: x.masked_select(x > 0), r"torch\.where\(mask, x, 0\)"),
    "aten.index.Tensor": (lambda x, i: x[x > 0], r"torch\.where\(mask, x, 0\) instead of x\[mask\]"),
    "aten._unique2.default": (lambda x, i: i.unique(), r"x\.sort\(\)\.values"),
    "aten.unique_dim.default": (lambda x, i: i.unique(dim=0), r"x\.sort\(\)\.values"),
    "aten.unique_consecutive.default": (lambda x, i: i.unique_consecutive(), r"x\.sort\(\)\.values"),
    "aten.repeat_interleave.Tensor": (lambda x, i: x.repeat_interleave(i), r"Pass output_size=\.\.\."),
    "aten.bincount.default": (lambda x, i: i.bincount(minlength=3), r"one_hot\(index, n\)\.sum\(0\)"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    function, remedy = SHAPES[name]
    f = spmd.jit(function, P(), P(), mesh=MESH)
    with pytest.raises(TraceError, match=rf"(?s)The shape of the result of {name} {HERE}.*{remedy}"):
        f(torch.randn(4), torch.tensor([1, 2, 0, 1]))


VALUES = {
    "item": lambda x, i: x * x.sum().item(),
    "float": lambda x, i: x * float(x.sum()),
    "slice": lambda x, i: x[: i[0]],
    "if": lambda x, i: x if x.sum() > 0 else -x,
    "range": lambda x, i: [x for _ in range(i[0])],
    "tolist": lambda x, i: x * i.tolist()[0],
    "one_hot": lambda x, i: F.one_hot(i),
    "equal": lambda x, i: x if torch.equal(x, x) else -x,
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    f = spmd.jit(VALUES[name], P(), P(), mesh=MESH)
    reason = {
        "slice": rf"needed as a Python number {HERE}.*\(\.item.*static_argnums",
        "one_hot": rf"needed as a Python number {HERE}.*\(\.item.*static_argnums",
        "equal": rf"needed as a Python number {HERE}.*\(aten\.equal\.default, \.item.*static_argnums",
        "tolist": rf"\.tolist\(\) {HERE}.* needs the values of tensor i i64\[4\].*Return the tensor",
    }.get(name, rf"{HERE}.* needs the values of tensor \w+ .*static_argnums")
    with pytest.raises(TraceError, match=rf"(?s){reason}"):
        f(torch.randn(4), torch.tensor([1, 2, 0, 1]))


def test_lists_of_numbers_that_depend_on_no_argument() -> None:
    """As constructors of models make them."""

    def f(x):
        return x * sum(torch.linspace(0, 1, 5).split([2, 3])[1].tolist()) + torch.arange(4).view(2, 2).tolist()[1][0]

    x = torch.randn(4)
    torch.testing.assert_close(spmd.jit(f, P(), P(), mesh=MESH)(x).full_tensor(), f(x))


INSTEAD: dict[str, Any] = {
    "nonzero_static": lambda x, i: torch.nonzero_static(x > 0, size=3),
    "where": lambda x, i: torch.where(x > 0, x, 0).sum() / (x > 0).sum(),
    "output_size": lambda x, i: x.repeat_interleave(i, output_size=4),
    "one_hot": lambda x, i: F.one_hot(i, 3).sum(0),
    "index_add": lambda x, i: torch.zeros(3).index_add(0, i, x),
    "mask write": lambda x, i: torch.where(x > 0, x, 0).clone().index_put_((x > 0.5,), torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_the_errors_advise(name: str) -> None:
    x, i = torch.randn(4), torch.tensor([1, 2, 0, 1])
    expected = INSTEAD[name](x, i)
    torch.testing.assert_close(spmd.jit(INSTEAD[name], P("x"), P(), mesh=MESH)(x, i).full_tensor(), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, places: torch.tensor_split(x, places),
        lambda x, places: x.tensor_split(tensor_indices_or_sections=places),
    ],
)
def test_a_split_at_the_places_of_a_tensor_is_refused(function):
    with pytest.raises(TraceError, match=r"tensor_split at test_data_dependence\.py:\d+ .*tuple of integers"):
        trace(function, (torch.ones(6), torch.tensor([1, 3])))


def test_a_split_at_given_places_is_traced():
    assert len(trace(lambda x: x.tensor_split((1, 3)), (torch.ones(6),)).graph.outputs) == 3


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_what_depends_on_shapes_only_has_a_value(spec: P) -> None:
    """`torch.cov` compares the count that it divides by with a number."""
    x = torch.randn(5, 3, dtype=torch.float64)
    f = lambda x: torch.cov(x.T)  # noqa: E731
    torch.testing.assert_close(spmd.jit(f, spec, P(), mesh=MESH)(x).full_tensor(), f(x))


def test_what_depends_on_an_argument_cannot_be_compared() -> None:
    with pytest.raises(TraceError, match=rf"aten.equal.default.* {HERE}|{HERE}.*aten.equal.default"):
        spmd.jit(lambda x: x * torch.equal(x, torch.ones(4)), P(), P(), mesh=MESH)(torch.ones(4))
