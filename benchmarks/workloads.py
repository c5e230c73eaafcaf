"""The GPT step of the benchmarks at any size, on an abstract mesh: what planning takes, and nothing allocated."""

from __future__ import annotations

from typing import Any

import attrs
import optree
import torch
from torch._subclasses import FakeTensorMode

import gpt
import layouts
import spmd
import training
from spmd import TensorMeta


@attrs.frozen(eq=False)
class GptStep:
    """A training step of a GPT by one of the strategies, to be planned.

    Args:
        config: the model.
        strategy: the name of a strategy in `layouts.STRATEGIES`.
        batch: sequences in a step.
        mesh: sizes of mesh axes; those that show the strategy best by default.
    """

    config: gpt.Config
    strategy: str
    batch: int
    mesh: dict[str, int] | None = None

    @property
    def training(self) -> training.Training:
        """The step on its mesh."""
        strategy = layouts.STRATEGIES[self.strategy]
        mesh = spmd.make_mesh(self.mesh or dict(strategy.mesh), runtime="abstract")
        return training.Training(self.config, strategy, mesh)

    def jitted(self, **options: Any) -> Any:
        """The jitted step; `options` go to `spmd.jit`."""
        with FakeTensorMode():  # specs of fully sharded parameters look at their shapes
            return self.training.step(**options)

    def arguments(self) -> tuple[Any, Any]:
        """The state and the batch, as metas."""
        with FakeTensorMode():
            state = training.init(self.config, self.training.optimizer)
        tokens = TensorMeta((self.batch, self.config.context), torch.int64)
        return optree.tree_map(lambda leaf: TensorMeta(tuple(leaf.shape), leaf.dtype), state), (tokens, tokens)
