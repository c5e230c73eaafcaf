"""A Llama for one device, to be planned rather than trained here: GQA, SwiGLU, RMSNorm, rotary positions.

Parameters are meta tensors, so nothing of the 70B model is ever allocated. Source: Touvron et al.,
"Llama 2" (2023); Dubey et al., "The Llama 3 Herd of Models" (2024).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

import spmd
from spmd import P
from spmd.optim import AdamWState, Optimizer, adamw

Params = dict[str, Any]


@attrs.frozen
class Config:
    """The sizes of a model; the defaults are those of Llama 3 70B.

    Args:
        vocab: number of different tokens.
        width: length of the residual stream.
        heads, kv_heads: heads of queries, and of keys and values, which queries share in groups.
        hidden: features inside the feed-forward layer.
        layers: transformer blocks.
        context: sequence length.
        dtype: of parameters and activations.
    """

    vocab: int = 128_256
    width: int = 8192
    heads: int = 64
    kv_heads: int = 8
    hidden: int = 28_672
    layers: int = 80
    context: int = 4096
    dtype: torch.dtype = torch.bfloat16

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads


LLAMA_70B = Config()
LLAMA_7B = Config(vocab=32_000, width=4096, heads=32, kv_heads=32, hidden=11_008, layers=32)


def params(config: Config) -> Params:
    """The parameters as meta tensors; linear weights are `[out, in]`."""
    meta = lambda *shape: torch.empty(shape, dtype=config.dtype, device="meta")  # noqa: E731
    width, hidden, narrow = config.width, config.hidden, config.kv_heads * config.head_width
    blocks = [
        {
            "norm1": meta(width),
            "q": meta(width, width),
            "k": meta(narrow, width),
            "v": meta(narrow, width),
            "o": meta(width, width),
            "norm2": meta(width),
            "gate": meta(hidden, width),
            "up": meta(hidden, width),
            "down": meta(width, hidden),
        }
        for _ in range(config.layers)
    ]
    return {
        "tokens": meta(config.vocab, width),
        "blocks": blocks,
        "norm": meta(width),
        "head": meta(config.vocab, width),
    }


def param_specs(config: Config, model: str | None = "model", data: str | None = None) -> Params:
    """Where the parameters lie: Megatron's split over `model`, and every matrix also over `data` (FSDP) if named."""
    columns, rows, whole = P(model, data), P(data, model), P()
    block = dict.fromkeys(("q", "k", "v", "gate", "up"), columns) | {"o": rows, "down": rows}
    blocks = [block | {"norm1": whole, "norm2": whole} for _ in range(config.layers)]
    return {"tokens": columns, "blocks": blocks, "norm": whole, "head": columns}


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of `x`, `[batch, heads, context, head_width]`."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(x: Tensor, block: Params, angles: Tensor, config: Config) -> Tensor:
    """Causal self-attention with grouped queries of `x`, `[batch, context, width]`."""
    batch, length, width = x.shape

    def heads(name: str, count: int) -> Tensor:
        return F.linear(x, block[name]).view(batch, length, count, config.head_width).transpose(1, 2)

    q, k = rotate(heads("q", config.heads), angles), rotate(heads("k", config.kv_heads), angles)
    v = heads("v", config.kv_heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=config.kv_heads < config.heads)
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), block["o"])


def loss(params: Params, batch: tuple[Tensor, Tensor], config: Config) -> Tensor:
    """The mean cross-entropy of the next token, in nats; tokens and targets are int64 `[batch, context]`."""
    tokens, targets = batch
    half = config.head_width // 2
    rates = 500_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(tokens.shape[1], dtype=torch.float32)[:, None] * rates
    x = F.embedding(tokens, params["tokens"])
    for block in params["blocks"]:
        x = x + attention(F.rms_norm(x, (config.width,), block["norm1"]), block, angles, config)
        y = F.rms_norm(x, (config.width,), block["norm2"])
        x = x + F.linear(F.silu(F.linear(y, block["gate"])) * F.linear(y, block["up"]), block["down"])
    logits = F.linear(F.rms_norm(x, (config.width,), params["norm"]), params["head"])
    return F.cross_entropy(logits.view(-1, config.vocab).float(), targets.reshape(-1))


@attrs.frozen(eq=False)
class Training:
    """A training step of a Llama on a mesh, for planning.

    Args:
        config: the model.
        mesh: over which ranks; abstract for sizes that nobody has here.
        batch: sequences in a step.
        fully_sharded: whether parameters and moments lie over `data` too.
        optimizer: AdamW by default.
    """

    config: Config
    mesh: spmd.Mesh
    batch: int
    fully_sharded: bool = True
    optimizer: Optimizer = attrs.field(factory=lambda: adamw(lr=3e-4))

    def arguments(self) -> tuple[Any, Any]:
        """The state and the batch, on the meta device."""
        start = params(self.config)
        tokens = torch.empty(self.batch, self.config.context, dtype=torch.int64, device="meta")
        return (start, self.optimizer.init(start)), (tokens, tokens)

    def step(self, **options: Any) -> Any:
        """The jitted step; `options` go to `spmd.jit`."""
        config, optimizer = self.config, self.optimizer

        def train_step(state: Any, batch: Any) -> tuple[Any, Tensor]:
            weights, moments = state
            gradients, value = torch.func.grad_and_value(loss)(weights, batch, config)
            return optimizer.step(weights, moments, gradients), value

        axes = self.mesh.names
        model, data = ("model" if "model" in axes else None), ("data" if "data" in axes else None)
        specs = param_specs(config, model, data if self.fully_sharded else None)
        state = (specs, AdamWState(P(), specs, specs))
        return spmd.jit(train_step, (state, P(data)), (state, P()), mesh=self.mesh, **options)
