"""Bytes that the textbook schedules of the six strategies send, in closed form, and measurements of other systems.

All figures are bytes sent by one rank in one training step, with ring algorithms: an all-reduce of S bytes over n
ranks sends 2(n-1)/n S; an all-gather or a reduce-scatter, (n-1)/n of the bytes of the unsharded tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import optree

import gpt
import layouts
import spmd

FLOAT = 4
"""Bytes of a float32."""

BATCH = 16
WORKLOAD = gpt.Config()


@attrs.frozen
class Peers:
    """Megabytes that other systems were measured to send for the same workload on eight ranks.

    Args:
        jax: JAX 0.10 as it runs on CPU.
        jax_gpu: the same after the rewrites that its GPU compiler does.
        dtensor: torch DTensor 2.13, eager; None where it fails.
        dtensor_hinted: DTensor with redistributions written by hand.
    """

    jax: float
    jax_gpu: float
    dtensor: float | None
    dtensor_hinted: float


PEERS = {
    "dp": Peers(6.51, 6.51, 32.57, 6.51),
    "fsdp": Peers(9.77, 6.52, 19.27, 6.51),
    "tp": Peers(23.88, 16.54, 25.69, 16.54),
    "dp_tp": Peers(11.20, 8.05, 23.80, 8.26),
    "fsdp_tp": Peers(22.59, 17.08, None, 8.17),
    "sp": Peers(20.77, 13.88, 34.05, 16.58),
}


def textbook(name: str, config: gpt.Config = WORKLOAD, batch: int = BATCH) -> float:
    """Bytes that a rank sends in one step of the textbook schedule of a strategy on its own mesh.

    Data parallel: the gradients and the two sums of the mean loss are all-reduced. Fully sharded (ZeRO-3): parameters
    are gathered in forward and again in backward, and gradients are reduce-scattered. Tensor parallel (Megatron):
    activations are all-reduced after attention and after the MLP, forward and backward, after the embedding and,
    backward, before the head; the vocabulary-parallel cross-entropy reduces three numbers per token. Sequence parallel:
    the same with each all-reduce as a reduce-scatter and an all-gather, and with collectives for the gradients of the
    parameters that are applied to shards of the sequence.
    """
    strategy = layouts.STRATEGIES[name]
    data, model = strategy.mesh.get("data", 1), strategy.mesh.get("model", 1)
    sharded = sum(param_bytes(config, strategy)) if strategy.fully_sharded else 0.0
    replicated = 0.0 if strategy.fully_sharded else sum(param_bytes(config, strategy))
    numbers = 2 * min(data - 1, 2) * FLOAT  # one element is one block of the ring, sent once or twice by a rank
    total = 3 * scatter(data) * sharded + 2 * scatter(data) * replicated + numbers
    if not strategy.tensor_parallel:
        return total
    tokens = batch * config.context / data
    activations = (4 * config.layers + 2) * tokens * config.width * FLOAT
    total += 2 * scatter(model) * (activations + 3 * tokens * FLOAT)
    if strategy.sequence_parallel:
        partial = (2 * config.layers + 1) * 2 * config.width + config.layers * config.width  # norms, biases after down
        total += 2 * scatter(model) * partial * FLOAT + scatter(model) * config.context * config.width * FLOAT
    return total


def scatter(ranks: int) -> float:
    """The fraction of a tensor that a rank sends in a ring reduce-scatter or all-gather."""
    return (ranks - 1) / ranks


def param_bytes(config: gpt.Config, strategy: layouts.Strategy) -> Iterator[float]:
    """Bytes of each parameter on one rank when it is sharded over `model` only."""
    mesh = spmd.make_mesh({"model": strategy.mesh.get("model", 1)}, runtime="virtual")
    specs = layouts.param_specs(attrs.evolve(strategy, fully_sharded=False), mesh, config)
    for param, spec in zip(optree.tree_leaves(gpt.init(config)), optree.tree_leaves(specs), strict=True):
        yield param.numel() * FLOAT / math.prod(mesh.axis_size(axes) for axes in spec.dims)
