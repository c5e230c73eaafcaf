"""The benchmarks' GPT in torch's modules, and spread by torch's own systems: what `peers.py` compares with.

The arithmetic is that of `examples/gpt.py`, and the parameters are those of its `init`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gpt
import layouts


class Block(nn.Module):
    """Attention and the feed-forward layer, each after a norm and added to the residual stream."""

    causal: Tensor

    def __init__(self, config: gpt.Config) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        mask = torch.full((config.context, config.context), -torch.inf).triu(1)
        self.register_buffer("causal", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the block, `[batch, context, width]`; heads may be those of one rank."""
        batch, length, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (
            linear(normed).view(batch, length, -1, self.head_width).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width) + self.causal
        mixed = torch.softmax(scores, dim=-1) @ v
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """The model with its loss.

    Args:
        config: the sizes.
        params: the values of the parameters, as `gpt.init` gives them.
    """

    def __init__(self, config: gpt.Config, params: gpt.Params) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Parameter(torch.empty(config.context, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.load_state_dict(dict(named_weights(params)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the next token, in nats."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def named_weights(params: gpt.Params) -> Iterable[tuple[str, Tensor]]:
    """The parameters of `gpt.init` by the names that they have in `Gpt`."""
    yield "positions", params["positions"]
    yield from (("tokens.weight", params["tokens"]), ("head.weight", params["head"]))
    yield from ((f"norm.{part}", value) for part, value in params["norm"].items())
    for number, block in enumerate(params["blocks"]):
        for name, value in block.items():
            parts = value if isinstance(value, dict) else {"weight": value}
            yield from ((f"blocks.{number}.{name}.{part}", tensor) for part, tensor in parts.items())


def spread(model: Gpt, strategy: layouts.Strategy, mesh: DeviceMesh) -> nn.Module:
    """The model by torch's system for a strategy: `parallelize_module`, and DDP or FSDP2 for each block.

    Args:
        model: the model on one device.
        strategy: one of `layouts.STRATEGIES`.
        mesh: with the axes of the strategy.
    """
    if strategy.tensor_parallel:
        parallelize_module(model, mesh["model"], megatron(len(model.blocks)))
    if "data" not in (mesh.mesh_dim_names or ()):
        return model
    if not strategy.fully_sharded:
        return DistributedDataParallel(model, device_mesh=mesh["data"], gradient_as_bucket_view=True)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh["data"])
    return model


def megatron(layers: int) -> dict[str, ParallelStyle]:
    """Megatron's tensor parallelism, with logits that stay sharded for `loss_parallel`."""
    block: dict[str, Any] = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel)
    block |= dict.fromkeys(("o", "down"), RowwiseParallel)
    plan: dict[str, ParallelStyle] = {
        f"blocks.{number}.{name}": style() for number in range(layers) for name, style in block.items()
    }
    plan["tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return plan


def adam(model: nn.Module, kind: str) -> torch.optim.Adam:
    """Torch's Adam with the constants of the benchmarks; `kind` is `"foreach"` or `"fused"`.

    List operators take DTensors of one mesh only, or none: each mesh has its own group of parameters.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    options: list[dict[str, Any]] = [{"params": group} for group in groups.values()]
    return torch.optim.Adam(options, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, **{kind: True})
