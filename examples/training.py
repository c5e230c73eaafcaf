"""One training step of a GPT, and the same step on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

import gpt
import layouts
import spmd
from spmd.optim import AdamWState, MasterWeightsState, Optimizer, adamw, master_weights

Step = Callable[["State", gpt.Batch], tuple["State", Tensor]]


class State(NamedTuple):
    """What a step takes and gives back: a pytree."""

    params: gpt.Params
    optimizer: AdamWState | MasterWeightsState


def make_optimizer(config: gpt.Config) -> Optimizer:
    """Adam, for parameters in bfloat16 on a copy of them in float32."""
    adam = adamw(lr=1e-3, b1=0.9, b2=0.95, eps=1e-8)
    return adam if config.dtype == torch.float32 else master_weights(adam)


def init(config: gpt.Config, optimizer: Optimizer, seed: int = 0) -> State:
    """The state before the first step, on one device."""
    params = gpt.init(config, seed)
    return State(params, optimizer.init(params))


def make_step(config: gpt.Config, optimizer: Optimizer, residual: Callable[[Tensor], Tensor] = lambda x: x) -> Step:
    """The step for one device: forward, backward, update, loss."""

    def loss(params: gpt.Params, batch: gpt.Batch) -> Tensor:
        return gpt.loss(params, batch, config, residual=residual)

    def train_step(state: State, batch: gpt.Batch) -> tuple[State, Tensor]:
        grads, value = torch.func.grad_and_value(loss)(state.params, batch)
        return State(*optimizer.step(state.params, state.optimizer, grads)), value

    return train_step


@attrs.frozen(eq=False)
class Training:
    """A training step spread over a mesh by one of the strategies.

    Args:
        config: the model.
        strategy: how the step is spread.
        mesh: over which ranks.
        optimizer: `make_optimizer(config)` by default.
    """

    config: gpt.Config
    strategy: layouts.Strategy
    mesh: spmd.Mesh
    optimizer: Optimizer = attrs.Factory(lambda self: make_optimizer(self.config), takes_self=True)

    @property
    def state_spec(self) -> State:
        """The specs of the state: Adam's moments lie like their parameters."""
        params = layouts.param_specs(self.strategy, self.mesh, self.config)
        adam = AdamWState(spmd.P(), params, params)
        return State(params, adam if self.config.dtype == torch.float32 else MasterWeightsState(params, adam))

    def init(self, seed: int = 0) -> State:
        """The state before the first step, placed on the mesh."""
        return spmd.distribute(init(self.config, self.optimizer, seed), self.state_spec, self.mesh)

    def step(self, **options: Any) -> Any:
        """The jitted step, in which gradients are reduced in float32; `options` go to `spmd.jit`."""
        function = make_step(self.config, self.optimizer, layouts.residual(self.strategy, self.mesh))
        specs = self.state_spec
        batch = layouts.batch_spec(self.mesh)
        options.setdefault("reduce_dtype", torch.float32)
        return spmd.jit(function, (specs, batch), (specs, spmd.P()), mesh=self.mesh, **options)

    def loss(self) -> Any:
        """The jitted loss alone."""
        residual = layouts.residual(self.strategy, self.mesh)

        def evaluate(params: gpt.Params, batch: gpt.Batch) -> Tensor:
            return gpt.loss(params, batch, self.config, residual=residual)

        specs = (self.state_spec.params, layouts.batch_spec(self.mesh))
        return spmd.jit(evaluate, specs, spmd.P(), mesh=self.mesh, reduce_dtype=torch.float32)
