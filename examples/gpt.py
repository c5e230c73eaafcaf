"""A GPT for one device: a pytree of parameters and pure functions, with no word about ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

import spmd

Params = dict[str, Any]
Batch = tuple[Tensor, Tensor]
"""Tokens and the tokens that follow them, each int64 `[batch, context]`."""


@attrs.frozen
class Config:
    """The sizes of a model; the defaults are the workload of the benchmarks.

    Args:
        vocab: number of different tokens.
        width: length of the residual stream.
        heads: attention heads, which divide `width`.
        layers: transformer blocks.
        context: longest sequence.
        fused_attention: `scaled_dot_product_attention` in place of plain operators.
        scan: whether the blocks are one loop, over their stacked parameters.
        dtype: of the parameters, and of all arithmetic but the loss.
    """

    vocab: int = 512
    width: int = 128
    heads: int = 8
    layers: int = 4
    context: int = 64
    fused_attention: bool = False
    scan: bool = False
    dtype: torch.dtype = torch.float32


def init(config: Config, seed: int = 0) -> Params:
    """Fresh parameters; linear weights are `[out, in]`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 0.02) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(config.dtype)

    def norm() -> Params:
        return {"weight": ones(width), "bias": zeros(width)}

    ones, zeros = (functools.partial(new, dtype=config.dtype) for new in (torch.ones, torch.zeros))
    width = config.width
    into_residual = 0.02 / math.sqrt(2 * config.layers)  # GPT-2: the stream's variance stays even as layers add to it
    blocks = [
        {
            "norm1": norm(),
            **{name: normal(width, width) for name in ("q", "k", "v")},
            "o": normal(width, width, scale=into_residual),
            "norm2": norm(),
            "up": {"weight": normal(4 * width, width), "bias": zeros(4 * width)},
            "down": {"weight": normal(width, 4 * width, scale=into_residual), "bias": zeros(width)},
        }
        for _ in range(config.layers)
    ]
    return {
        "tokens": normal(config.vocab, width),
        "positions": normal(config.context, width),
        "blocks": spmd.stack_layers(blocks) if config.scan else blocks,
        "norm": norm(),
        "head": normal(config.vocab, width),
    }


def attention(x: Tensor, block: Params, config: Config) -> Tensor:
    """Causal self-attention of `x`, `[batch, context, width]`."""
    batch, length, width = x.shape
    q, k, v = (
        F.linear(x, block[name]).view(batch, length, config.heads, width // config.heads).transpose(1, 2)
        for name in ("q", "k", "v")
    )
    if config.fused_attention:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // config.heads) + mask
        mixed = torch.softmax(scores, dim=-1) @ v
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), block["o"])


def mlp(x: Tensor, block: Params) -> Tensor:
    """The feed-forward layer of a block, four times wider inside."""
    hidden = F.gelu(F.linear(x, block["up"]["weight"], block["up"]["bias"]), approximate="tanh")
    return F.linear(hidden, block["down"]["weight"], block["down"]["bias"])


def forward(
    params: Params, tokens: Tensor, config: Config, *, residual: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """Logits `[batch, context, vocab]` of int64 `tokens` `[batch, context]`.

    `residual` is applied to the residual stream after everything that is added to it: a place to say how it lies.
    """

    def norm(x: Tensor, parameters: Params) -> Tensor:
        return F.layer_norm(x, (config.width,), parameters["weight"], parameters["bias"])

    def layer(x: Tensor, block: Params) -> Tensor:
        x = residual(x + attention(norm(x, block["norm1"]), block, config))
        return residual(x + mlp(norm(x, block["norm2"]), block))

    x = F.embedding(tokens, params["tokens"]) + params["positions"][: tokens.shape[1]]
    if config.scan:
        x, _ = spmd.scan(lambda x, block: (layer(x, block), None), x, params["blocks"])
    else:
        for block in params["blocks"]:
            x = layer(x, block)
    return F.linear(norm(x, params["norm"]), params["head"])


def loss(params: Params, batch: Batch, config: Config, *, residual: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """The mean cross-entropy of the next token, in nats."""
    tokens, targets = batch
    logits = forward(params, tokens, config, residual=residual)
    return F.cross_entropy(logits.view(-1, config.vocab).float(), targets.reshape(-1))


@torch.no_grad()
def generate(params: Params, prompt: Tensor, config: Config, length: int, seed: int = 0) -> Tensor:
    """`length` tokens that follow the int64 `prompt` `[tokens]`, sampled at temperature 0.8 on one device."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(length):
        logits = forward(params, tokens[None, -config.context :], config)[0, -1]
        drawn = torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator)
        tokens = torch.cat([tokens, drawn])
    return tokens[len(prompt) :]
