"""Stock modules with sharded parameters: eager, and inside of `jit`, against one device."""

from __future__ import annotations

import pytest
import torch
from stock_models import MODELS, STRATEGIES, assert_trains_alike
from torch.func import functional_call, grad_and_value

import spmd
from spmd import P
from spmd.core.pytree import tree_map

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, strategy: str) -> None:
    assert_trains_alike(model, strategy, MESH)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
def test_inside_of_jit(model: str, strategy: str) -> None:
    make, shape = MODELS[model]
    module = make()
    x = torch.randn(shape, dtype=torch.float64)
    params = {name: value.detach() for name, value in module.named_parameters()}
    buffers = {name: value.detach() for name, value in module.named_buffers()}
    optimizer = spmd.optim.adamw(1e-2)

    def step(params, buffers, state, x):
        def loss(params):
            held = {name: value.clone() for name, value in buffers.items()}  # the module writes to them
            return functional_call(module, {**params, **held}, (x,)).sin().sum(), held

        gradients, (value, written) = grad_and_value(loss, has_aux=True)(params)
        params, state = optimizer.step(params, state, gradients)
        return value, params, written

    specs = {name: STRATEGIES[strategy](name, value) for name, value in params.items()}
    state = optimizer.init(params)
    jitted = spmd.jit(step, (specs, P(), P(), P("data")), (P(), specs, P()), mesh=MESH)
    found, expected = jitted(params, buffers, state, x), step(params, buffers, state, x)
    torch.testing.assert_close(tree_map(spmd.DTensor.full_tensor, found), expected, rtol=1e-7, atol=1e-9)
