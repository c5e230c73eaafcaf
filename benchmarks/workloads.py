"""The GPT step of the benchmarks at any size, on an abstract mesh: it can be planned, and allocates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import optree
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import gpt
import layouts
import spmd
import training
from spmd import P, TensorMeta
from spmd.inspect import Plan


@attrs.frozen(eq=False)
class GptStep:
    """A training step of a GPT by one of the strategies, to be planned.

    Args:
        config: the model.
        strategy: the name of a strategy in `layouts.STRATEGIES`.
        batch: sequences in a step.
        mesh: sizes of the mesh axes; by default, the strategy's own mesh.
        moments: the strategy that shards the optimizer's state, if it is different.
        loss: replaces `gpt.loss`; called as `loss(params, batch, config)`.
        gradients: applied to the gradients before the optimizer gets them; used with `loss` only.
    """

    config: gpt.Config
    strategy: str
    batch: int
    mesh: dict[str, int] | None = None
    moments: str | None = None
    loss: Callable[[gpt.Params, gpt.Batch, gpt.Config], Tensor] | None = None
    gradients: Callable[[gpt.Params], gpt.Params] | None = None

    def training(self, strategy: str | None = None) -> training.Training:
        """The training setup of a strategy (by default its own), on the step's mesh."""
        chosen = layouts.STRATEGIES[strategy or self.strategy]
        mesh = spmd.make_mesh(self.mesh or dict(layouts.STRATEGIES[self.strategy].mesh), runtime="abstract")
        return training.Training(self.config, chosen, mesh)

    def jitted(self, **options: Any) -> Any:
        """The jitted step; `options` go to `spmd.jit`."""
        with FakeTensorMode():  # specs of fully sharded parameters look at their shapes
            own = self.training()
            specs = training.State(own.state_spec.params, self.training(self.moments).state_spec.optimizer)
        function = training.make_step(own.config, own.optimizer, layouts.residual(own.strategy, own.mesh))
        if self.loss is not None:
            function = self._step_of(self.loss, self.gradients or (lambda grads: grads))
        return spmd.jit(function, (specs, layouts.batch_spec(own.mesh)), (specs, P()), mesh=own.mesh, **options)

    def _step_of(
        self,
        loss: Callable[[gpt.Params, gpt.Batch, gpt.Config], Tensor],
        gradients: Callable[[gpt.Params], gpt.Params],
    ) -> training.Step:
        optimizer = self.training().optimizer

        def train_step(state: training.State, batch: gpt.Batch) -> tuple[training.State, Tensor]:
            grads, value = torch.func.grad_and_value(loss)(state.params, batch, self.config)
            return training.State(*optimizer.step(state.params, state.optimizer, gradients(grads))), value

        return train_step

    def arguments(self) -> tuple[Any, Any]:
        """The state and the batch, as pytrees of `TensorMeta`."""
        with FakeTensorMode():
            state = training.init(self.config, self.training().optimizer)
        tokens = TensorMeta((self.batch, self.config.context), torch.int64)
        return optree.tree_map(lambda leaf: TensorMeta(tuple(leaf.shape), leaf.dtype), state), (tokens, tokens)

    def plan(self, **options: Any) -> Plan:
        """The plan; `options` go to `spmd.jit`."""
        return self.jitted(**options).plan(*self.arguments())
