"""Items at places that scalars of the trace say: those that torch takes, by reading the scalars, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import spmd
from spmd import P

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
CLOSED = torch.randn(5, 4)


def assigned(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y = x.clone()
    y[i] = 0
    y[1:, j] = x[0, 0]
    y[..., j, 1] = 7.5
    y[i, j, 0] = i
    return y


def in_place(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y = x.clone()
    y[i, 1:] += x[j, 1:]
    return y


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, j: x[i],
        lambda x, i, j: x[:, j],
        lambda x, i, j: x[i, :, j],
        lambda x, i, j: x[None, i, ..., j],
        lambda x, i, j: x[1:, i, 1],
        lambda x, i, j: x[j][i],
        lambda x, i, j: x[j + i, torch.tensor(1)],
        lambda x, i, j: CLOSED[j] + x[0, :, 0],
        lambda x, i, j: torch.func.grad(lambda x: x[i, j].square().sum())(x),
        assigned,
        in_place,
    ],
)
@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "model")])
def test_items(function: Callable[..., Any], spec: P) -> None:
    x, i, j = torch.randn(5, 4, 3), torch.tensor(-1), torch.tensor(2, dtype=torch.int32)
    actual = spmd.jit(function, (spec, P(), P()), P(), mesh=MESH)(x, i, j)
    torch.testing.assert_close(actual.full_tensor(), function(x, i, j))


def test_a_batch_of_places() -> None:
    places = torch.tensor([1, 0, 4])
    actual = spmd.jit(lambda i: torch.func.vmap(lambda i: CLOSED[i])(i), mesh=MESH)(places)
    torch.testing.assert_close(actual.full_tensor(), CLOSED[places])


@pytest.mark.parametrize("index", [lambda i: (i, [0, 1]), lambda i: slice(i), lambda i: (slice(None), slice(i, None))])
def test_what_needs_the_value_is_refused(index: Callable[[Tensor], Any]) -> None:
    with pytest.raises(spmd.TraceError, match=r"test_scalar_indexes\.py:\d+"):
        spmd.jit(lambda i: CLOSED[index(i)], mesh=MESH)(torch.tensor(1))
