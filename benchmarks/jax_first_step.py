"""The first two steps of the benchmarks' GPT by JAX on one device; `first_step.py` runs it in a process of its own.

    python benchmarks/jax_first_step.py FILE [--scan]

FILE holds a pickled pair of parameters and batch, in NumPy's arrays. It needs JAX and nothing of this project. Prints
JAX's version, the seconds of both steps (wall, processor) and their losses as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_steps

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # not those of jax_steps

RATE = 0.1


def sgd_step(params: Any, batch: Any) -> Any:
    """Forward, backward and SGD."""
    loss, grads = jax.value_and_grad(jax_steps.loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def main() -> None:
    """Run two steps and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--scan", action="store_true", help="the blocks are a lax.scan over their stacked parameters")
    options = parser.parse_args()
    params, batch = pickle.loads(options.file.read_bytes())
    if options.scan:
        params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])
    params, batch = jax.block_until_ready(jax.tree.map(jnp.asarray, (params, batch)))
    step, seconds, losses = jax.jit(sgd_step, donate_argnums=0), [], []
    for _ in range(2):
        wall, cpu = time.perf_counter(), time.process_time()
        params, loss = jax.block_until_ready(step(params, batch))
        seconds += [time.perf_counter() - wall, time.process_time() - cpu]
        losses.append(float(loss))
    print(json.dumps({"version": f"jax {jax.__version__}", "seconds": seconds, "losses": losses}))


if __name__ == "__main__":
    main()
