"""The benchmarks' GPT step by JAX on 8 host devices and on one; `virtual_ranks.py` runs it in a process of its own.

    python benchmarks/jax_steps.py --width 512 --batch 16 --rounds 5

It needs JAX and nothing of this project, so that JAX can be installed in an environment of its own. The model is that
of `examples/gpt.py`; strategies are `in_shardings` and `out_shardings` alone, as `layouts.STRATEGIES` has them. Prints
processor seconds of a step (medians) as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

RANKS = 8
HEADS, LAYERS, CONTEXT, VOCAB = 8, 4, 64, 256

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={RANKS}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402  (reads the flags when it is imported)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

P = PartitionSpec


def init(width: int) -> Any:
    """Fresh parameters; linear weights are `[out, in]`."""
    generator = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 0.02) -> Any:
        return generator.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    def norm() -> Any:
        return {"weight": np.ones(width, np.float32), "bias": np.zeros(width, np.float32)}

    small = 0.02 / math.sqrt(2 * LAYERS)
    blocks = [
        {
            "norm1": norm(),
            **{name: normal(width, width) for name in ("q", "k", "v")},
            "o": normal(width, width, scale=small),
            "norm2": norm(),
            "up": {"weight": normal(4 * width, width), "bias": np.zeros(4 * width, np.float32)},
            "down": {"weight": normal(width, 4 * width, scale=small), "bias": np.zeros(width, np.float32)},
        }
        for _ in range(LAYERS)
    ]
    tables = {"tokens": normal(VOCAB, width), "positions": normal(CONTEXT, width), "head": normal(VOCAB, width)}
    return {**tables, "blocks": blocks, "norm": norm()}


def loss_of(params: Any, batch: Any) -> Any:
    """The mean cross-entropy of the next token; stacked blocks, a dict, are a `lax.scan`."""
    tokens, targets = batch
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    if isinstance(params["blocks"], dict):
        x, _ = jax.lax.scan(lambda x, block: (layer(x, block), None), x, params["blocks"])
    else:
        for block in params["blocks"]:
            x = layer(x, block)
    logits = jax.nn.log_softmax(layer_norm(x, params["norm"]) @ params["head"].T)
    return -jnp.take_along_axis(logits, targets[..., None], -1).mean()


def layer(x: Any, block: Any) -> Any:
    """The residual stream after a block."""
    x = x + attention(layer_norm(x, block["norm1"]), block)
    hidden = layer_norm(x, block["norm2"]) @ block["up"]["weight"].T + block["up"]["bias"]
    return x + jax.nn.gelu(hidden, approximate=True) @ block["down"]["weight"].T + block["down"]["bias"]


def layer_norm(x: Any, parameters: Any) -> Any:
    """The norm over the last dim."""
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return normed * parameters["weight"] + parameters["bias"]


def attention(x: Any, block: Any) -> Any:
    """Causal self-attention in plain operators."""
    batch, length, width = x.shape
    q, k, v = (
        (x @ block[name].T).reshape(batch, length, HEADS, width // HEADS).transpose(0, 2, 1, 3) for name in "qkv"
    )
    mask = jnp.triu(jnp.full((length, length), -jnp.inf), 1)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(width // HEADS) + mask
    mixed = jax.nn.softmax(scores) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width) @ block["o"].T


def train_step(state: Any, batch: Any) -> Any:
    """Forward, backward and Adam."""
    params, first, second, count = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    count = count + 1
    rate, root = 1e-3 / (1 - 0.9**count), jnp.sqrt(1 - 0.95**count)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, grads)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) / root + 1e-8), params, first, second)
    return (params, first, second, count), loss


def param_specs(strategy: str, params: Any) -> Any:
    """The spec of each parameter, as in `examples/layouts.py`."""
    if strategy == "fsdp":
        return jax.tree.map(_largest_dim, params)
    if strategy == "dp":
        return jax.tree.map(lambda _: P(), params)
    norm, columns, rows = {"weight": P(), "bias": P()}, P("ranks"), P(None, "ranks")
    block = {
        **dict.fromkeys(("norm1", "norm2"), norm),
        **dict.fromkeys("qkv", columns),
        "o": rows,
        "up": {"weight": columns, "bias": columns},
        "down": {"weight": rows, "bias": P()},
    }
    tables = {"tokens": columns, "positions": P(), "head": columns}
    return {**tables, "blocks": [block] * LAYERS, "norm": norm}


def _largest_dim(param: Any) -> Any:
    chosen = max(range(param.ndim), key=lambda dim: (param.shape[dim] % RANKS == 0, param.shape[dim], -dim))
    return P(*[None] * chosen, "ranks")


def timed(step: Callable[[Any, Any], Any], state: Any, batch: Any, rounds: int) -> float:
    """The median processor seconds of a step."""
    seconds = []
    for _ in range(rounds + 2):
        start = time.process_time()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[2:])


def measure(strategy: str, width: int, size: int, rounds: int) -> float:
    """The seconds of a strategy; `"one device"` is one, too."""
    devices = np.array(jax.devices()[: 1 if strategy == "one device" else RANKS])
    mesh, params = Mesh(devices, ("ranks",)), init(width)
    specs = param_specs("dp" if strategy == "one device" else strategy, params)
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    held = jax.tree.map(place, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    state_sharding = (held, held, held, place(P()))
    batch_sharding = place(P("ranks") if strategy in ("dp", "fsdp") else P())
    tokens = np.random.default_rng(1).integers(VOCAB, size=(size, CONTEXT + 1)).astype(np.int32)
    zeros = jax.tree.map(np.zeros_like, params)
    state = jax.device_put((params, zeros, zeros, np.float32(0)), state_sharding)
    batch = jax.device_put((tokens[:, :-1], tokens[:, 1:]), batch_sharding)
    shardings = {"in_shardings": (state_sharding, batch_sharding), "out_shardings": (state_sharding, place(P()))}
    return timed(jax.jit(train_step, donate_argnums=0, **shardings), state, batch, rounds)


def main() -> int:
    """Print the seconds of each strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=["dp", "fsdp", "tp"])
    options = parser.parse_args()
    names = ["one device", *options.strategies]
    found = {name: measure(name, options.width, options.batch, options.rounds) for name in names}
    print(json.dumps({"version": jax.__version__, "seconds": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
