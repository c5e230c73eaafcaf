"""Generation with a Llama whose cache of keys and values is sharded along the sequence: what a token costs.

`python examples/decoding.py` plans one token of an 8B model after a context of 131,072 over 8 ranks, with the cache
sharded along the sequence or by heads, and prints what a rank sends, its peak memory and the predicted time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import spmd
from llama import Config, Params, param_specs, params, rotate
from spmd import P

LLAMA_8B = Config(width=4096, heads=32, kv_heads=8, hidden=14_336, layers=32)
CONTEXT = 131_072

Cache = list[tuple[Tensor, Tensor]]


def empty_cache(config: Config, length: int, batch: int = 1) -> Cache:
    """The keys and values of all layers as meta tensors, `[batch, kv_heads, length, head_width]`."""
    shape = batch, config.kv_heads, length, config.head_width
    meta = partial(torch.empty, shape, dtype=config.dtype, device="meta")
    return [(meta(), meta()) for _ in range(config.layers)]


def decode(params: Params, cache: Cache, token: Tensor, position: Tensor, config: Config) -> tuple[Tensor, Cache]:
    """One step of generation.

    Args:
        params: the parameters.
        cache: the keys and values of the tokens before, `[batch, kv_heads, length, head_width]` for each layer.
        token: the last token, int64 `[batch]`.
        position: its place in the sequence, int64 `[1]`.
        config: the model.

    Returns:
        The logits of the next token, `[batch, vocab]`, and the cache with the keys and values of `token`.
    """
    half = config.head_width // 2
    angles = position[:, None] * 500_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    seen = torch.arange(cache[0][0].shape[2]) <= position
    x = F.embedding(token[:, None], params["tokens"])
    written = []
    for block, (keys, values) in zip(params["blocks"], cache, strict=True):
        y = F.rms_norm(x, (config.width,), block["norm1"])
        q, k, v = (F.linear(y, block[name]).unflatten(-1, (-1, config.head_width)).transpose(1, 2) for name in "qkv")
        keys, values = keys.index_copy(2, position, rotate(k, angles)), values.index_copy(2, position, v)
        grouped = config.kv_heads < config.heads
        mixed = F.scaled_dot_product_attention(rotate(q, angles), keys, values, seen[None], enable_gqa=grouped)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), block["o"])
        y = F.rms_norm(x, (config.width,), block["norm2"])
        x = x + F.linear(F.silu(F.linear(y, block["gate"])) * F.linear(y, block["up"]), block["down"])
        written.append((keys, values))
    return F.linear(F.rms_norm(x, (config.width,), params["norm"]), params["head"])[:, 0], written


def jitted(config: Config, mesh: spmd.Mesh, layout: str, **options: Any) -> Any:
    """The step with the cache in a layout: `"sequence"`, `"heads"`, or `"sequence, whole weights"`.

    Args:
        config: the model.
        mesh: has one axis, `x`.
        layout: of the cache; weights are split over the ranks as Megatron does, or whole on each.
        options: go to `spmd.jit`.
    """
    weights, logits = (P(), P()) if layout == "sequence, whole weights" else (param_specs(config, "x"), P(None, "x"))
    cut = P(None, "x") if layout == "heads" else P(None, None, "x")
    return spmd.jit(partial(decode, config=config), (weights, cut, P(), P()), (logits, cut), mesh=mesh, **options)


def arguments(config: Config, length: int) -> tuple[Any, ...]:
    """The arguments of `decode` on the meta device, for a cache of `length` tokens."""
    number = torch.empty(1, dtype=torch.int64, device="meta")
    return params(config), empty_cache(config, length), number, number


def main() -> None:
    """Print what a token costs in each layout."""
    mesh = spmd.make_mesh({"x": 8}, runtime="abstract")
    for layout in ("sequence", "heads", "sequence, whole weights"):
        plan = jitted(LLAMA_8B, mesh, layout).plan(*arguments(LLAMA_8B, CONTEXT))
        merges = sum(comm.bytes for comm in plan.comms if "attention" in comm.cause and "sharded dim" in comm.cause)
        print(
            f"{layout}: a rank sends {sum(comm.bytes for comm in plan.comms) / 1e6:.2f} MB, {merges / 1e6:.2f} of it "
            f"in attention; peak {plan.memory.peak / 1e9:.1f} GB, {1e3 * plan.seconds:.2f} ms"
        )


if __name__ == "__main__":
    main()
