"""Textbook schedules to the letter, at width 4096: the steps that ask for them, and what they send in closed form.

`textbook.py` has the bytes of the small workload; here are the collectives one by one, of models whose weights are
worth leaving where they are.
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
    """The loss with Megatron's pins: what enters and leaves attention and MLP is whole, with its gradient.

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
    """Pins what linear layers and embeddings take and give, with its gradient, to each rank's part of the batch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (F.linear, F.embedding):
            return function(*args, **(kwargs or {}))
        rows, weight, *rest = args
        return self.own(function(self.own(rows), weight, *rest, **(kwargs or {})))

    def own(self, x: Tensor) -> Tensor:
        return spmd.constrain(x, P("data"))


def own_loss(params: gpt.Params, batch: gpt.Batch, config: gpt.Config) -> Tensor:
    """The loss where every rank computes on its part of the batch alone."""
    with OwnBatch():
        return gpt.loss(params, batch, config)


def gathered_loss(params: gpt.Params, batch: gpt.Batch, config: gpt.Config) -> Tensor:
    """The same of parameters that every rank has whole."""
    return own_loss(optree.tree_map(lambda weight: spmd.reshard(weight, P()), params), batch, config)


def pending(gradients: gpt.Params) -> gpt.Params:
    """Gradients that every rank has of its own part of the batch, still to be summed."""
    return optree.tree_map(lambda gradient: spmd.constrain(gradient, P(partial={"data": "sum"})), gradients)


def summed(gradients: gpt.Params) -> gpt.Params:
    """The same, then summed on every rank."""
    return optree.tree_map(lambda gradient: spmd.constrain(gradient, P()), pending(gradients))


def parameter_bytes(config: gpt.Config) -> Iterator[float]:
    """Bytes of every parameter but the positions."""
    width = config.width * FLOAT
    for _ in range(config.layers):
        yield from (width,) * 5  # two norms' weights and biases, the bias after the MLP
        yield 4 * width
        yield from (config.width * width,) * 4
        yield from (4 * config.width * width,) * 2
    yield from (width,) * 2
    yield from (config.vocab * width,) * 2


def data_parallel(config: gpt.Config) -> Sent:
    """One all-reduce a parameter, and two for the mean loss."""
    sizes = [*parameter_bytes(config), config.context * config.width * FLOAT]
    return Counter(("all_reduce", 2 * scatter(RANKS) * size) for size in sizes) + mean_loss()


def free_data_parallel(config: gpt.Config) -> Sent:
    """Data parallelism at its cheapest.

    The all-reduce of the positions is in two halves, a reduce-scatter and an all-gather, with what pads its gradient
    between.
    """
    half = scatter(RANKS) * config.context * config.width * FLOAT
    halves = Counter({("reduce_scatter", half): 1, ("all_gather", half): 1})
    return data_parallel(config) - Counter({("all_reduce", 2 * half): 1}) + halves


def fully_sharded(config: gpt.Config) -> Sent:
    """One gather and one reduce-scatter a parameter; so too of ZeRO-1, whose gathers are of updated parameters."""
    sizes = [*parameter_bytes(config), config.context * config.width * FLOAT]
    kinds = ("all_gather", "reduce_scatter")
    return Counter((kind, scatter(RANKS) * size) for kind in kinds for size in sizes) + mean_loss()


def mean_loss() -> Sent:
    """The sum of the loss and the number of its tokens."""
    return Counter({("all_reduce", 2.0 * FLOAT): 2})


def sequence_parallel(config: gpt.Config, batch: int) -> Sent:
    """Activations of tensor parallelism at its cheapest: four pairs of reduce-scatter and all-gather a layer.

    Each pair sends what an all-reduce would; norms and sums between its halves are done on a part of the sequence.
    """
    activation = scatter(RANKS) * batch * config.context * config.width * FLOAT
    return Counter({("all_gather", activation): 4 * config.layers, ("reduce_scatter", activation): 4 * config.layers})


def megatron(config: gpt.Config, batch: int) -> Sent:
    """Megatron's collectives of activations, and those of its vocabulary-parallel loss.

    Four all-reduces a layer, one of the embedding and one of the gradient before the head; the loss reduces a token's
    largest logit and the sum of its exponentials and, in the gradient, one number more. The gradient of the bias after
    each MLP is summed in shares and gathered, where Megatron repeats the sum.
    """
    tokens = 2 * scatter(RANKS) * batch * config.context * FLOAT
    bias = ("all_gather", scatter(RANKS) * config.width * FLOAT)
    reduced = {("all_reduce", tokens * config.width): 4 * config.layers + 2, ("all_reduce", tokens): 3}
    return Counter(reduced | {bias: config.layers})


@attrs.frozen(eq=False)
class Schedule:
    """A step that is planned as a textbook schedule.

    Args:
        step: makes the step of a number of layers.
        sent: its collectives in closed form.
        smallest: bytes from which on collectives are compared; 0 for all.
    """

    step: Callable[[int], GptStep]
    sent: Callable[[int], Sent]
    smallest: float = 0.0

    def found(self, plan: Plan) -> Sent:
        """The collectives of a plan that are to be compared."""
        return Counter((comm.kind, comm.bytes) for comm in plan.comms if comm.bytes >= self.smallest)


TOKENS = 4 * 256
"""Of tensor parallelism. Data parallelism is the optimum where a rank has eight times as many."""

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
"""By name; those that are pinned are asked for, by `constrain`, `reshard` and `keep_sharded`, with 1,024 tokens a
rank (tensor parallelism: in all); the others are the optimum."""
