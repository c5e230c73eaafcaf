"""Runtimes move operations; one that may write into a donated argument must not do so before its last reader."""

import pytest
import torch

import spmd
from spmd import P

RANKS = {"data": 4}


def read_then_written(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product varies between ranks and reads `w`; the sum is the same on all of them, and may be written to `w`."""
    product = x * w
    return w + 1, product


def scaled(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * w, x + w


@pytest.mark.parametrize("function", [read_then_written, scaled])
@pytest.mark.parametrize("length", [8, 6, 1])
def test_shared_values_are_written_after_their_last_reader(function, length):
    mesh = spmd.make_mesh(RANKS, runtime="virtual")
    w, x = torch.arange(1.0, 4.0), torch.arange(3.0 * length).view(length, 3)
    out = (P(), P("data")) if function is read_then_written else (P("data"), P("data"))
    step = spmd.jit(function, (P(), P("data")), out, mesh=mesh, donate_argnums=0)
    donated = spmd.distribute(w, P(), mesh)
    for got, wanted in zip(step(donated, x), function(w, x), strict=True):
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=0, atol=0)


def test_the_order_matters(monkeypatch):
    """Without the rule, the first case is wrong: the test can fail."""
    monkeypatch.setattr("spmd.runtime.codegen.restricted", lambda operation, dying: operation)
    mesh = spmd.make_mesh(RANKS, runtime="virtual")
    w, x = torch.arange(1.0, 4.0), torch.arange(24.0).view(8, 3)
    step = spmd.jit(read_then_written, (P(), P("data")), (P(), P("data")), mesh=mesh, donate_argnums=0)
    _, product = step(spmd.distribute(w, P(), mesh), x)
    assert not torch.equal(product.full_tensor(), x * w)
