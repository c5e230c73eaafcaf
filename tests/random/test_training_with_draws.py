"""Training with dropout by keys: the same losses on every layout, also of runs that stop and go on elsewhere."""

from __future__ import annotations

import functools

import pytest
import torch
from sampling import product, sample
from stock_models import STRATEGIES
from torch import nn
from torch.func import functional_call, grad_and_value

import spmd
from spmd import P
from spmd.checkpoint import Position, load, save

LAYOUTS = {
    "1": ({"data": 1}, "dp"),
    "3 dp": ({"data": 3}, "dp"),
    "4 fsdp": ({"data": 4}, "fsdp"),
    "8 dp": ({"data": 8}, "dp"),
    "2x4 tp": ({"data": 2, "model": 4}, "tp"),
    "4x2 fsdp tp": ({"data": 4, "model": 2}, "fsdp_tp"),
}
STEPS = 6
X = torch.randn(8, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@functools.cache
def model() -> nn.Module:
    """An encoder with dropout of weights of attention and of activations, and a dropout of words."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Dropout1d(0.1), encoder, nn.Linear(16, 16)).double()


OPTIMIZER = spmd.optim.adamw(1e-2)


def step(params, state, x):
    def loss(params):
        found = functional_call(model(), params, (x + 0.1 * torch.randn_like(x),))
        return (found - x).square().mean()

    gradients, value = grad_and_value(loss)(params)
    return *OPTIMIZER.step(params, state, gradients), value


@functools.cache
def trained(layout):
    """The specs, the mesh, and the step of a layout."""
    axes, strategy = LAYOUTS[layout]
    rule = STRATEGIES[strategy]
    specs = {name: rule(name.removeprefix("1."), value) for name, value in model().named_parameters()}
    mesh = spmd.make_mesh(axes, runtime="virtual")
    return specs, mesh, spmd.jit(step, (specs, None, P("data")), (specs, None, P()), mesh=mesh, rng="counter")


def start(layout, seed=5):
    """The state before the first step; the seed is that of all draws."""
    specs, mesh, _ = trained(layout)
    params = spmd.distribute({name: value.detach() for name, value in model().named_parameters()}, specs, mesh)
    state = OPTIMIZER.init(params)
    torch.manual_seed(seed)
    return params, state


def run(layout, carry, steps):
    """Some steps: the state after them, and the losses."""
    losses = []
    for _ in range(steps):
        *carry, loss = trained(layout)[2](*carry, X)
        losses.append(loss.item())
    return carry, losses


@functools.cache
def expected():
    return run("1", start("1"), STEPS)[1]


@pytest.mark.parametrize("layout", sample(LAYOUTS, ["3 dp", "4x2 fsdp tp"]))
def test_losses_are_the_same_on_every_layout(layout):
    torch.testing.assert_close(run(layout, start(layout), STEPS)[1], expected(), rtol=1e-9, atol=0)


def test_losses_depend_on_the_seed():
    assert abs(run("1", start("1", seed=6), 1)[1][0] - expected()[0]) > 1e-3


@pytest.mark.parametrize(
    ("stop", "layouts"), product([1, 3, 4], [("1", "4 fsdp"), ("8 dp", "2x4 tp"), ("2x4 tp", "3 dp")])
)
def test_a_run_that_stops_goes_on_elsewhere_with_the_losses_of_one_that_does_not(tmp_path, stop, layouts):
    before, after = layouts
    (params, state), losses = run(before, start(before), stop)
    save({"params": params, "state": state, "position": Position.now(stop)}, tmp_path / "checkpoint")
    torch.manual_seed(99)
    like_params, like_state = start(after, seed=100)
    found = load(tmp_path / "checkpoint", {"params": like_params, "state": like_state, "position": Position()})
    found["position"].restore()
    losses += run(after, (found["params"], found["state"]), STEPS - found["position"].step)[1]
    torch.testing.assert_close(losses, expected(), rtol=1e-9, atol=0)
