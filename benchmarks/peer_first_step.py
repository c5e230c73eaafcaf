"""The first two steps of the benchmarks' GPT by `spmd` or torch; `first_step.py` runs it in a process of its own.

    python benchmarks/peer_first_step.py "spmd.jit" --layers 16 --width 128 --batch 8

Prints torch's version, the seconds of both steps (wall, processor) and their losses as JSON; `--save FILE` saves
parameters and batch for `jax_first_step.py` instead. What the first call of `spmd` imports must not be imported here.
"""

from __future__ import annotations

import argparse
import functools
import json
import pickle
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the model is the example's

import gpt
import spmd
from comms import workload_batch
from peer_model import Gpt
from spmd import P
from spmd.core.pytree import tree_map

RATE = 0.1

Step = Callable[[], float]


def by_spmd(model: Gpt, batch: gpt.Batch, **options: Any) -> Step:
    """The jitted step on one virtual rank."""
    step, state = _jitted(model, spmd.make_mesh({"data": 1}, runtime="virtual"), **options), _state(model)

    def run() -> float:
        nonlocal state
        state, loss = step(state, batch)
        return loss.item()

    return run


def compile_only(model: Gpt, batch: gpt.Batch) -> Step:
    """Trace, plan and lower the step for eight ranks; there is no loss."""
    step, state = _jitted(model, spmd.make_mesh({"data": 8}, runtime="abstract")), _state(model)

    def run() -> float:
        step.lower(state, batch)
        return float("nan")

    return run


def _state(model: Gpt) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _jitted(model: Gpt, mesh: spmd.Mesh, **options: Any) -> Any:
    def train_step(params: dict[str, Tensor], batch: gpt.Batch) -> tuple[dict[str, Tensor], Tensor]:
        loss_of = functools.partial(torch.func.functional_call, model)
        grads, loss = torch.func.grad_and_value(loss_of)(params, batch)
        return {name: value - RATE * grads[name] for name, value in params.items()}, loss

    return spmd.jit(train_step, (P(), P("data")), (P(), P()), mesh=mesh, donate_argnums=0, **options)


def by_torch(model: Gpt, batch: gpt.Batch, prepare: Callable[[Gpt], Any] = lambda model: model) -> Step:
    """Torch's step on one device, of what `prepare` returns of the model with its loss."""
    loss_of = prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=True)

    def run() -> float:
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def by_blocks(model: Gpt) -> Gpt:
    """Torch's regional compilation: each block is compiled, and the rest runs eagerly."""
    for block in model.blocks:
        block.compile()
    return model


ROWS: Mapping[str, Callable[[Gpt, gpt.Batch], Step]] = MappingProxyType(
    {
        "spmd.jit": by_spmd,
        "spmd.jit, data=8, compile only": compile_only,
        "spmd.jit, reuse_layers=False": functools.partial(by_spmd, reuse_layers=False),
        "torch eager": by_torch,
        "torch.compile": functools.partial(by_torch, prepare=torch.compile),
        "torch.compile of each block": functools.partial(by_torch, prepare=by_blocks),
    }
)


def clocks() -> tuple[float, float]:
    """Seconds of the wall clock, and of the processor with ended children, such as C++ compilers."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    """Run two steps of a row and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS, nargs="?")
    for name in ("layers", "width", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = gpt.Config(width=options.width, layers=options.layers)
    params, batch = gpt.init(config), workload_batch(config, options.batch)
    if options.save:
        arrays = tree_map(Tensor.numpy, (params, batch))
        options.save.write_bytes(pickle.dumps(arrays))
        return
    step, seconds, losses = ROWS[options.row](Gpt(config, params), batch), [], []
    for _ in range(2):
        before = clocks()
        losses.append(step())
        seconds += [after - start for after, start in zip(clocks(), before, strict=True)]
    print(json.dumps({"version": f"torch {torch.__version__}", "seconds": seconds, "losses": losses}))


if __name__ == "__main__":
    main()
