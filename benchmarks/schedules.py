"""Exact textbook schedules at width 4096: the steps that are planned as them, and their collectives in closed form.

`textbook.py` has the total bytes of the small workload. This module lists each collective, for models so wide that
moving activations or gradients is cheaper than moving weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import optree
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import gpt
import spmd
from spmd import P
from spmd.inspect import Plan
from textbook import FLOAT, scatter
from workloads import GptStep

WIDTH, RANKS = 4096, 8

Sent = Counter[tuple[str, float]]
"""How many collectives of each kind and size, in bytes sent per rank."""


def config(layers: int, vocab: int = 512) -> gpt.Config:
    """A GPT of width 4096 with sequences of 256 tokens."""
    return gpt.Config(vocab=vocab, width=WIDTH, heads=32, layers=layers, context=256)


def megatron_loss(params: gpt.Params, batch: gpt.Batch, config: gpt.Config) -> Tensor:
    """The loss with Megatron's sharding constraints: inputs and outputs of attention and MLP are replicated.

    The gradients of these values are replicated too.

    Source: Shoeybi et al., "Megatron-LM" (2019), the conjugate operators f and g.
    """

    def whole(x: Tensor) -> Tensor:
        return spmd.constrain(x, P())

    def norm(x: Tensor, parameters: gpt.Params) -> Tensor:
        return whole(F.layer_norm(x, (config.width,), parameters["weight"], parameters["bias"]))

    tokens, targets = batch
    x = whole(F.embedding(tokens, params["tokens"])) + params["positions"]
    for block in params["blocks"]:
        x = x + whole(gpt.attention(norm(x, block["norm1"]), block, config))
        x = x + whole(gpt.mlp(norm(x, block["norm2"]), block))
    logits = spmd.constrain(F.linear(norm(x, params["norm"]), params["head"]), P(None, None, "model"))
    return F.cross_entropy(logits.view(-1, config.vocab), targets.reshape(-1))


class OwnBatch(TorchFunctionMode):
    """Shards the inputs and results of linear layers and embeddings, and their gradients, along the batch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (F.linear, F.embedding):
            return function(*args, **(kwargs or {}))
        rows, weight, *rest = args
        return self.own(function(self.own(rows), weight, *rest, **(kwargs or {})))

    def own(self, x: Tensor) -> Tensor:
        return spmd.constrain(x, P("data"))


def own_loss(params: gpt.Params, batch: gpt.Batch, config: gpt.Config) -> Tensor:
    """The loss where every rank computes on its own shard of the batch only."""
    with OwnBatch():
        return gpt.loss(params, batch, config)


def gathered_loss(params: gpt.Params, batch: gpt.Batch, config: gpt.Config) -> Tensor:
    """`own_loss` of parameters that are gathered first."""
    return own_loss(optree.tree_map(lambda weight: spmd.reshard(weight, P()), params), batch, config)


def pending(gradients: gpt.Params) -> gpt.Params:
    """The gradients as partial sums over `data`: those of each rank's own shard of the batch."""
    return optree.tree_map(lambda gradient: spmd.constrain(gradient, P(partial={"data": "sum"})), gradients)


def summed(gradients: gpt.Params) -> gpt.Params:
    """The gradients as partial sums over `data`, then all-reduced."""
    return optree.tree_map(lambda gradient: spmd.constrain(gradient, P()), pending(gradients))


def parameter_bytes(config: gpt.Config) -> Iterator[float]:
    """Bytes of every parameter but the position embedding."""
    width = config.width * FLOAT
    for _ in range(config.layers):
        yield from (width,) * 5  # two norms' weights and biases, the bias after the MLP
        yield 4 * width
        yield from (config.width * width,) * 4
        yield from (4 * config.width * width,) * 2
    yield from (width,) * 2
    yield from (config.vocab * width,) * 2


def data_parallel(config: gpt.Config) -> Sent:
    """The collectives of data parallelism: one all-reduce per parameter, and two for the mean loss."""
    sizes = [*parameter_bytes(config), config.context * config.width * FLOAT]
    return Counter(("all_reduce", 2 * scatter(RANKS) * size) for size in sizes) + mean_loss()


def free_data_parallel(config: gpt.Config) -> Sent:
    """The collectives of data parallelism where the planner is free to choose.

    The all-reduce of the position embedding's gradient is a reduce-scatter and an all-gather; the gradient is padded
    between them, on shards.
    """
    half = scatter(RANKS) * config.context * config.width * FLOAT
    halves = Counter({("reduce_scatter", half): 1, ("all_gather", half): 1})
    return data_parallel(config) - Counter({("all_reduce", 2 * half): 1}) + halves


def fully_sharded(config: gpt.Config) -> Sent:
    """The collectives of FSDP: one all-gather and one reduce-scatter per parameter, and two for the mean loss.

    Those of ZeRO-1 are the same; it gathers the updated parameters.
    """
    sizes = [*parameter_bytes(config), config.context * config.width * FLOAT]
    kinds = ("all_gather", "reduce_scatter")
    return Counter((kind, scatter(RANKS) * size) for kind in kinds for size in sizes) + mean_loss()


def mean_loss() -> Sent:
    """The all-reduces of the mean loss: of the sum of the loss and of the number of its tokens."""
    return Counter({("all_reduce", 2.0 * FLOAT): 2})


def sequence_parallel(config: gpt.Config, batch: int) -> Sent:
    """The collectives of activations in sequence parallelism: four pairs of reduce-scatter and all-gather per layer.

    Each pair sends as many bytes as an all-reduce; norms and sums between the two run on shards of the sequence.
    """
    activation = scatter(RANKS) * batch * config.context * config.width * FLOAT
    return Counter({("all_gather", activation): 4 * config.layers, ("reduce_scatter", activation): 4 * config.layers})


def megatron(config: gpt.Config, batch: int) -> Sent:
    """Megatron's collectives of activations, and those of its vocabulary-parallel loss.

    There are four all-reduces per layer, one of the embedding and one of the gradient before the head. For each token
    the loss reduces the largest logit and the sum of exponentials, and its gradient reduces one more number. The
    gradient of the bias after each MLP is summed in shards and gathered; in Megatron every rank repeats the sum.
    """
    tokens = 2 * scatter(RANKS) * batch * config.context * FLOAT
    bias = ("all_gather", scatter(RANKS) * config.width * FLOAT)
    reduced = {("all_reduce", tokens * config.width): 4 * config.layers + 2, ("all_reduce", tokens): 3}
    return Counter(reduced | {bias: config.layers})


@attrs.frozen(eq=False)
class Schedule:
    """A step that is planned as a textbook schedule.

    Args:
        step: from a number of layers, the step.
        sent: from a number of layers, its collectives in closed form.
        smallest: collectives that send fewer bytes than this are not compared.
    """

    step: Callable[[int], GptStep]
    sent: Callable[[int], Sent]
    smallest: float = 0.0

    def found(self, plan: Plan) -> Sent:
        """The collectives of a plan that are to be compared."""
        return Counter((comm.kind, comm.bytes) for comm in plan.comms if comm.bytes >= self.smallest)


TOKENS = 4 * 256
"""Tokens of a step with tensor parallelism; data parallelism has eight times as many per rank, to be the optimum."""

SCHEDULES = {
    "dp": Schedule(
        lambda layers: GptStep(config(layers), "dp", batch=256),
        lambda layers: free_data_parallel(config(layers)),
    ),
    "fsdp": Schedule(
        lambda layers: GptStep(config(layers), "fsdp", batch=256),
        lambda layers: fully_sharded(config(layers)),
    ),
    "zero1": Schedule(
        lambda layers: GptStep(config(layers), "dp", batch=256, moments="fsdp"),
        lambda layers: fully_sharded(config(layers)),
    ),
    "tp": Schedule(
        lambda layers: GptStep(config(layers), "tp", batch=4),
        lambda layers: sequence_parallel(config(layers), batch=4),
        smallest=scatter(RANKS) * TOKENS * WIDTH * FLOAT,
    ),
    "dp, pinned": Schedule(
        lambda layers: GptStep(config(layers), "dp", batch=32, loss=own_loss, gradients=summed),
        lambda layers: data_parallel(config(layers)),
    ),
    "fsdp, pinned": Schedule(
        lambda layers: GptStep(config(layers), "fsdp", batch=32, loss=gathered_loss, gradients=pending),
        lambda layers: fully_sharded(config(layers)),
    ),
    "zero1, pinned": Schedule(
        lambda layers: GptStep(config(layers), "dp", batch=32, moments="fsdp", loss=own_loss, gradients=pending),
        lambda layers: fully_sharded(config(layers)),
    ),
    "tp, pinned": Schedule(
        lambda layers: GptStep(config(layers, vocab=32_768), "tp", batch=4, loss=megatron_loss),
        lambda layers: megatron(config(layers, vocab=32_768), batch=4),
        smallest=2 * scatter(RANKS) * TOKENS * FLOAT,
    ),
}
"""The schedules by name.

Those that are not pinned are the optimum by themselves. The pinned ones are requested by `constrain`, `reshard` and
`keep_sharded`, with 1,024 tokens per rank (tensor parallelism: 1,024 in all).
"""
