"""Operators on batches stay batched: tensors that are cut in their batch dims only need no communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.core.pytree import tree_leaves

MESH = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")


def square(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, 4, 4, dtype=torch.float64)


def positive(*batch: int) -> torch.Tensor:
    x = square(*batch)
    return x @ x.mT + torch.eye(4, dtype=x.dtype)


def lines() -> torch.Tensor:
    return torch.randn(5, 3, 6, dtype=torch.float64)


BATCHED: dict[str, tuple[Callable[..., Any], Callable[[], torch.Tensor]]] = {
    "fft": (torch.fft.fft, lines),
    "ifft": (torch.fft.ifft, lines),
    "rfft": (torch.fft.rfft, lines),
    "irfft": (lambda x: torch.fft.irfft(x, 6), lines),
    "hfft": (torch.fft.hfft, lines),
    "rfft gradient": (torch.func.grad(lambda x: torch.fft.rfft(x).abs().sum()), lines),
    "topk": (lambda x: tuple(x.topk(2)), lines),
    "topk gradient": (torch.func.grad(lambda x: x.topk(2).values.square().sum()), lines),
    "sort": (lambda x: tuple(x.sort()), lines),
    "sort gradient": (torch.func.grad(lambda x: (x.sort().values * torch.arange(6.0)).sum()), lines),
    "argsort": (lambda x: x.argsort(), lines),
    "kthvalue": (lambda x: tuple(x.kthvalue(2)), lines),
    "median": (lambda x: tuple(x.median(-1)), lines),
    "argmax": (lambda x: x.argmax(-1), lines),
    "cumsum": (lambda x: x.cumsum(-1), lines),
    "cumsum gradient": (torch.func.grad(lambda x: x.cumsum(-1).square().sum()), lines),
    "cumprod": (lambda x: x.cumprod(-1), lines),
    "cummax": (lambda x: tuple(x.cummax(-1)), lines),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), lines),
    "logcumsumexp gradient": (torch.func.grad(lambda x: x.logcumsumexp(-1).sum()), lines),
    "searchsorted": (lambda x: torch.searchsorted(x.sort().values, x * 0.7), lines),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=x.dtype)), lines),
    "gather": (lambda x: x.gather(-1, x.argsort()), lines),
    "take_along_dim": (lambda x: x.take_along_dim(x.argsort(), -1), lines),
    "scatter_reduce": (lambda x: x.scatter_reduce(-1, x.argsort() // 2, x, "amax"), lines),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), lambda: torch.randn(5, 6, dtype=torch.float64)),
    "unfold": (lambda x: x.unfold(-1, 3, 1), lines),
    "unfold gradient": (torch.func.grad(lambda x: x.unfold(-1, 3, 1).square().sum()), lines),
    "roll": (lambda x: x.roll(2, -1), lines),
    "flip": (lambda x: x.flip(-1), lines),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, -1), lines),
    "cholesky": (torch.linalg.cholesky, lambda: positive(5, 2)),
    "cholesky gradient": (torch.func.grad(lambda x: torch.linalg.cholesky(x).sum()), lambda: positive(5, 2)),
    "cholesky_solve": (lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(x)), lambda: positive(5, 2)),
    "eigh": (lambda x: torch.linalg.eigh(x).eigenvalues, lambda: positive(5, 2)),
    "eigh gradient": (torch.func.grad(lambda x: torch.linalg.eigh(x).eigenvalues.log().sum()), lambda: positive(5, 2)),
    "qr": (lambda x: torch.linalg.qr(x).R.abs(), lambda: square(5, 2)),
    "qr gradient": (torch.func.grad(lambda x: torch.linalg.qr(x).R.abs().sum()), lambda: square(5, 2)),
    "svd": (lambda x: torch.linalg.svd(x, full_matrices=False).S, lambda: square(5, 2)),
    "svd gradient": (torch.func.grad(lambda x: torch.linalg.svd(x).S.sum()), lambda: square(5, 2)),
    "solve": (lambda x: torch.linalg.solve(x, x.mT), lambda: positive(5, 2)),
    "solve gradient": (torch.func.grad(lambda x: torch.linalg.solve(x, x.mT).sum()), lambda: positive(5, 2)),
    "solve_triangular": (lambda x: torch.linalg.solve_triangular(x.tril(), x, upper=False), lambda: positive(5, 2)),
    "inv": (torch.linalg.inv, lambda: positive(5, 2)),
    "det": (torch.linalg.det, lambda: positive(5, 2)),
    "slogdet gradient": (torch.func.grad(lambda x: torch.linalg.slogdet(x).logabsdet.sum()), lambda: positive(5, 2)),
    "pinv": (torch.linalg.pinv, lambda: positive(5, 2)),
    "matrix_exp": (torch.linalg.matrix_exp, lambda: square(5, 2)),
    "diagonal": (lambda x: x.diagonal(dim1=-2, dim2=-1), lambda: square(5, 2)),
    "diagonal gradient": (
        torch.func.grad(lambda x: x.diagonal(dim1=-2, dim2=-1).square().sum()),
        lambda: square(5, 2),
    ),
    "diag_embed": (torch.diag_embed, lines),
    "cross": (lambda x: torch.linalg.cross(x[..., :3], x[..., 3:]), lines),
    "tril": (torch.tril, lambda: square(5, 2)),
}
"""Functions of a tensor whose first dim is a batch, and what they are called with; batches of 5 are cut unevenly."""


@pytest.mark.parametrize("name", BATCHED)
def test_batches_need_no_communication(name: str) -> None:
    function, make = BATCHED[name]
    x = make()
    expected = function(x)
    for axes in ("x", ("y", "x")):
        sharded = spmd.jit(function, P(axes), P(axes), mesh=MESH)
        assert () == sharded.plan(x).comms
        for wanted, given in zip(tree_leaves(expected), tree_leaves(sharded(x)), strict=True):
            torch.testing.assert_close(given.full_tensor(), wanted)
