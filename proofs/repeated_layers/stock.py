"""Stock models of transformers with several layers, as programs whose plans by both searches are compared."""

from __future__ import annotations

import torch

import spmd
from proofs.models.cases import MODELS
from proofs.models.measure import STRATEGIES, sharded, training_step
from proofs.repeated_layers.programs import Repeated
from spmd import P

_DEEP = [model for model in MODELS if model.trains and model.takes_layers]

COUNT = len(_DEEP) * len(STRATEGIES)
"""How many there are."""


def stock(number: int, layers: int = 6) -> Repeated:
    """A training step of one of the models by one of the strategies."""
    model, strategy = _DEEP[number // len(STRATEGIES)], STRATEGIES[number % len(STRATEGIES)]
    torch.manual_seed(0)
    module = model.make(layers).double().train()
    inputs = {**model.inputs(), **model.training()}
    params = {name: value.detach() for name, value in module.named_parameters()}
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    mesh, specs = sharded(strategy, module, params, inputs)
    step = training_step(module, model.backward)
    jitted = spmd.jit(step, (specs, P(), P("data")), mesh=mesh)
    name = f"{model.name}, {layers} layers, {strategy}"
    return Repeated(number, name, step, (params, buffers, inputs), jitted, mesh, None)
