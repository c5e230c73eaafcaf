"""torch.func.linearize outside of jit: right for DTensors and jitted functions, torch's own for all else."""

import pytest
import torch
from torch.func import linearize

import spmd
from spmd import P
from spmd.api.transforms import linearize as module

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")
X, T = torch.randn(5, 3), torch.randn(5, 3)


def scores(x):
    return (x * x.exp()).sum(0)


def test_functions_of_plain_tensors_are_recorded_by_torch(monkeypatch):
    monkeypatch.setattr(module, "evaluated_anew", None)
    found = linearize(scores, X)
    torch.testing.assert_close((found[0], found[1](T)), torch.func.jvp(scores, (X,), (T,)))


def test_a_jitted_function_among_plain_operators():
    jitted = spmd.jit(scores, P("data"), P(), mesh=MESH)
    with spmd.implicit_replication():
        result, push = linearize(lambda x: jitted(x.sin()) * 2, X)
        tangent = push(T)
    expected = torch.func.jvp(lambda x: scores(x.sin()) * 2, (X,), (T,))
    torch.testing.assert_close((result.full_tensor(), tangent.full_tensor()), expected)


def test_the_tangents_are_checked():
    _, push = linearize(scores, spmd.distribute(X, P("data"), MESH))
    with pytest.raises(RuntimeError, match="doesn't match the shape"):
        push(spmd.distribute(T[:2], P("data"), MESH))


def test_random_numbers_are_refused():
    x = spmd.distribute(X, P("data"), MESH)
    _, push = linearize(lambda x: x * torch.rand_like(x), x)
    with pytest.raises(spmd.TraceError, match=r"draws random numbers: each call of the linear function"):
        push(x)
