"""Textbook schedules to the letter, at width 4096: the steps that ask for them, and what they send in closed form.

`textbook.py` has the bytes of the small workload; here are the collectives one by one, of models whose weights are
worth leaving where they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import torch.nn.functional as F
from torch import Tensor

import gpt
import spmd
from spmd import P
from spmd.plan import Plan
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
    """One all-reduce a parameter, and two for the mean loss.

    That of the positions is in two halves, a reduce-scatter and an all-gather, with what pads its gradient between.
    """
    positions = scatter(RANKS) * config.context * config.width * FLOAT
    halves = {("reduce_scatter", positions): 1, ("all_gather", positions): 1}
    return (
        Counter(("all_reduce", 2 * scatter(RANKS) * size) for size in parameter_bytes(config))
        + Counter(halves)
        + mean_loss()
    )


def fully_sharded(config: gpt.Config) -> Sent:
    """One gather and one reduce-scatter a parameter; so too of ZeRO-1, whose gathers are of updated parameters."""
    sizes = [*parameter_bytes(config), config.context * config.width * FLOAT]
    kinds = ("all_gather", "reduce_scatter")
    return Counter((kind, scatter(RANKS) * size) for kind in kinds for size in sizes) + mean_loss()


def mean_loss() -> Sent:
    """The sum of the loss and the number of its tokens."""
    return Counter({("all_reduce", 2 * scatter(RANKS) * FLOAT): 2})


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
        lambda layers: data_parallel(config(layers)),
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
    "tp, pinned": Schedule(
        lambda layers: GptStep(config(layers, vocab=32_768), "tp", batch=4, loss=megatron_loss),
        lambda layers: megatron(config(layers, vocab=32_768), batch=4),
        smallest=2 * scatter(RANKS) * TOKENS * FLOAT,
    ),
}
"""By name; the last is asked for by pins and `keep_sharded`, the others are the optimum."""
