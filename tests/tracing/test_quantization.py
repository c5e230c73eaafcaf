"""Quantization-aware training inside: statistics are buffers, which are assigned to the module after the call."""

from __future__ import annotations

import pytest
import torch
import torch.ao.quantization as Q

import spmd
from spmd import P

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
X = torch.linspace(-2.0, 3.0, 20).view(5, 4)
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")


def prepared(backend: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).train()
    model.qconfig = Q.get_default_qat_qconfig(backend)  # type: ignore[assignment]
    Q.prepare_qat(model, inplace=True)
    return model


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
def test_a_prepared_model_trains_as_on_one_device(backend: str) -> None:
    """The first weights of fbgemm are quantized by channels, for which the first call makes the statistics."""
    mine, alone = prepared(backend), prepared(backend)

    def step(model: torch.nn.Module, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, params, (x,)).square().mean()  # type: ignore[no-any-return]

        return torch.func.grad_and_value(loss)(dict(model.named_parameters()))

    jitted = spmd.jit(step, (P(), P("x")), mesh=MESH)
    for number in range(4):
        x = X * (number + 1)
        alone.zero_grad()
        expected = alone(x).square().mean()
        expected.backward()
        with torch.no_grad():
            gradients, found = jitted(mine, x)
        torch.testing.assert_close(found.full_tensor(), expected.detach())
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(gradients[name].full_tensor(), parameter.grad)
        torch.testing.assert_close(dict(mine.named_buffers()), dict(alone.named_buffers()))
        for model in (mine, alone):
            model.apply({1: Q.disable_observer, 2: Q.disable_fake_quant}.get(number, lambda module: None))


@pytest.mark.parametrize("make", [Q.FakeQuantize, Q.MovingAverageMinMaxObserver, Q.HistogramObserver])
def test_modules_that_decide_by_values_are_refused(make: type[torch.nn.Module]) -> None:
    step = spmd.jit(lambda module, x: module(x) + 1, (P(), P("x")), mesh=MESH)
    with pytest.raises(spmd.TraceError, match=r"torch.ao.quantization at test_quantization.py.* FusedMovingAvg"):
        step(make(), X)


@pytest.mark.parametrize(
    "make", [Q.MinMaxObserver, Q.PerChannelMinMaxObserver, Q.MovingAveragePerChannelMinMaxObserver]
)
def test_observers_that_do_not_decide(make: type[torch.nn.Module]) -> None:
    mine, alone = make(), make()
    step = spmd.jit(lambda module, x: module(x) + 1, (P(), P("x")), mesh=MESH)
    for x in (X, X * 2):
        torch.testing.assert_close(step(mine, x).full_tensor(), alone(x) + 1)
    torch.testing.assert_close(dict(mine.named_buffers()), dict(alone.named_buffers()))
