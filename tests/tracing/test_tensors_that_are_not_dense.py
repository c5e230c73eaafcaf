"""Nested, sparse and quantized tensors: arguments, closed over, or made inside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import spmd
from spmd import P

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
X, Y = torch.ones(3, 4), torch.ones(2, 4)
LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
pytestmark = pytest.mark.filterwarnings("ignore")


@LAYOUTS
@pytest.mark.parametrize("call", ["jit", "without specs", "shard_map", "distribute", "closed over", "made inside"])
def test_nested_tensors_are_one_error(layout: torch.layout, call: str) -> None:
    nested = torch.nested.nested_tensor([X, Y], layout=layout)
    calls: dict[str, Callable[[], object]] = {
        "jit": lambda: spmd.jit(lambda x: x * 2, P("x"), mesh=MESH)(nested),
        "without specs": lambda: spmd.jit(lambda x: x * 2, mesh=MESH)(nested),
        "shard_map": lambda: spmd.shard_map(lambda x: x * 2, MESH, P("x"), P("x"))(nested),
        "distribute": lambda: spmd.distribute(nested, P("x"), MESH),
        "closed over": lambda: spmd.jit(lambda x: (nested * 2).sum() + x, P("x"), mesh=MESH)(X),
        "made inside": lambda: spmd.jit(
            lambda x, y: torch.nested.as_nested_tensor([x, y], layout=layout) * 2, P("x"), mesh=MESH
        )(X, Y),
    }
    with pytest.raises(spmd.SpmdError, match=r"is a nested tensor.* torch.nested.to_padded_tensor"):
        calls[call]()


def test_lengths_of_rows_that_are_arguments() -> None:
    step = spmd.jit(lambda x, offsets: torch.nested.nested_tensor_from_jagged(x, offsets).sum(), P(), mesh=MESH)
    with pytest.raises(spmd.TraceError, match="is a nested tensor"):
        step(X, torch.tensor([0, 1, 3]))


def test_closed_over_tensors_that_are_not_dense() -> None:
    sparse, quantized = torch.eye(4).to_sparse(), torch.quantize_per_tensor(torch.eye(4), 1.0, 0, torch.quint8)
    functions = (lambda x: x + sparse.to_dense(), lambda x: x @ sparse, lambda x: x + quantized.dequantize())
    for function in functions:
        with pytest.raises(spmd.TraceError, match=r"closes over a tensor that must be dense \(got torch\."):
            spmd.jit(function, P("x"), mesh=MESH)(torch.ones(4, 4))
