"""The LSTM of `loops.py` by JAX on one device, by `lax.scan` and unrolled; `loops.py` runs it in a process of its own.

    python benchmarks/jax_loops.py --steps 500 --unrolled 20 --batch 8 --width 64 --rounds 5

It needs JAX and nothing of this project. Prints processor seconds of value and gradient as JSON: of the first call, and
of a later one, the least of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np


def cell(params: Any, state: Any, x: Any) -> Any:
    """One step, with torch's order of gates."""
    h, c = state
    gates = x @ params["inputs"] + h @ params["hidden"] + params["bias"]
    i, f, g, o = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def loss(params: Any, xs: Any, unrolled: bool) -> Any:
    """The mean square of all outputs."""
    start = (jnp.zeros_like(xs[0]),) * 2
    if not unrolled:
        return jnp.square(jax.lax.scan(lambda state, x: cell(params, state, x), start, xs)[1]).mean()
    state, outputs = start, []
    for x in xs:
        state, h = cell(params, state, x)
        outputs.append(h)
    return jnp.square(jnp.stack(outputs)).mean()


def seconds(call: Callable[[], Any]) -> float:
    """The processor time of a call."""
    start = time.process_time()
    jax.block_until_ready(call())
    return time.process_time() - start


def measure(steps: int, unrolled: bool, batch: int, width: int, rounds: int) -> dict[str, float]:
    """The least seconds of a first call and of later ones."""
    generator = np.random.default_rng(0)
    normal = lambda *shape: generator.standard_normal(shape, dtype=np.float32) / np.float32(width**0.5)  # noqa: E731
    params = {"inputs": normal(width, 4 * width), "hidden": normal(width, 4 * width), "bias": normal(4 * width)}
    params, xs = jax.tree.map(jnp.asarray, (params, normal(steps, batch, width)))
    first, later = [], []
    for _ in range(1 if unrolled else 2):
        step = jax.jit(jax.value_and_grad(lambda params, xs: loss(params, xs, unrolled)))
        first.append(seconds(lambda step=step: step(params, xs)))  # type: ignore[misc]
        later += [seconds(lambda step=step: step(params, xs)) for _ in range(rounds)]  # type: ignore[misc]
    return {"first": min(first), "step": min(later)}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 500), ("unrolled", 20), ("batch", 8), ("width", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    sizes = args.batch, args.width, args.rounds
    jax.jit(jnp.sin)(1.0)
    found = {
        "scan": measure(args.steps, False, *sizes),
        "unrolled": measure(args.unrolled, True, *sizes),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
