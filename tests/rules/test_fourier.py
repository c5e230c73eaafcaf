"""Fourier transforms over several dims of which one is sharded: values, gradients, and what they send."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sampling import product
from torch import fft

import spmd
from spmd import P

BYTES_COUNT = spmd.Machine(link_bandwidth=1.0, latency=0.0)
"""A machine on which bytes alone decide: small tensors are not gathered."""

Function = Callable[[torch.Tensor], torch.Tensor]

TRANSFORMS: dict[str, tuple[Function, torch.dtype]] = {
    "fftn": (fft.fftn, torch.complex128),
    "fft2 of real": (lambda x: fft.fft2(x, norm="forward"), torch.float64),
    "ifftn": (lambda x: fft.ifftn(x, dim=(1, 0, 2), norm="ortho"), torch.complex128),
    "rfftn": (fft.rfftn, torch.float64),
    "rfft2": (lambda x: fft.rfft2(x, dim=(1, 0)), torch.float64),
    "irfftn": (lambda x: fft.irfftn(x, norm="ortho"), torch.complex128),
    "irfft2 to odd": (lambda x: fft.irfft2(x, s=(5, 7), dim=(2, 0)), torch.complex128),
    "hfft2": (lambda x: fft.hfft2(x, dim=(0, 1)), torch.complex128),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("cut", range(3))
def test_an_exchange_is_sent_and_no_gather(name: str, cut: int) -> None:
    """A shard of complex numbers, and twice where the real side must be complete in between."""
    function, dtype = TRANSFORMS[name]
    mesh = spmd.make_mesh({"x": 8}, runtime="virtual")
    plan = spmd.jit(function, (P(*(None,) * cut, "x"),), None, mesh=mesh).plan(
        torch.empty(64, 64, 64, dtype=dtype, device="meta")
    )
    assert "all_gather" not in {comm.kind for comm in plan.comms}
    assert 2 * 64**3 / 8 * 16 >= sum(comm.bytes for comm in plan.comms)


@pytest.mark.parametrize(("name", "axes"), product(TRANSFORMS, [{"x": 4}, {"x": 2, "y": 2}]))
@pytest.mark.parametrize("shape", [(5, 6, 4), (3, 4, 5)])
def test_values_and_gradients_are_those_of_one_device(name: str, axes: dict[str, int], shape: tuple[int, ...]) -> None:
    function, dtype = TRANSFORMS[name]
    mesh = spmd.make_mesh(axes, runtime="virtual")
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    gradient = torch.func.grad(lambda x: (function(x).abs() ** 3).sum())
    for cut in range(3):
        spec = P(*(None,) * cut, tuple(axes))
        for each in (function, gradient):
            step = spmd.jit(each, (spec,), None, mesh=mesh, machine=BYTES_COUNT)
            torch.testing.assert_close(step(x).full_tensor(), each(x))
