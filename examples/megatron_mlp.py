"""Megatron's MLP twice: by hand, as what one rank does, and by `jit`, from specs alone.

By hand there is one collective in the code, the psum after the second product. The backward pass has another: the input
is the same on all ranks of `model`, its product with a shard of the weights is not, and the cast in between, which the
types of per-rank values insert, has a psum as its transpose. Along `data`, which the body does not name, sums of
gradients are the planner's.

python examples/megatron_mlp.py
torchrun --nproc-per-node 4 examples/megatron_mlp.py

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import optree
import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import gelu

import report
import spmd
from layouts import Strategy
from spmd import P
from spmd.collectives import psum

Params = dict[str, Tensor]
MLP = Callable[[Params, Tensor], Tensor]

SPECS = {"up": P(None, "model"), "down": P("model")}
"""`up [width, hidden]` is split by its columns, `down [hidden, width]` by its rows."""

BATCH = P("data")
"""Of inputs, targets and results `[batch, width]`."""

TOLERANCE = 1e-5
"""How far a gradient may be from one device's, whose rounding is another, relative to its largest entry."""


def mlp(params: Params, x: Tensor) -> Tensor:
    """The MLP for one device."""
    return gelu(x @ params["up"]) @ params["down"]


def rank_mlp(params: Params, x: Tensor) -> Tensor:
    """The MLP of one rank: with its columns of `up` and its rows of `down` it computes one summand of the result."""
    return psum(gelu(x @ params["up"]) @ params["down"], "model")


def by_hand(mesh: spmd.Mesh) -> MLP:
    """`rank_mlp` as a function of global values; along `data` they stay global inside too."""
    return spmd.shard_map(rank_mlp, mesh, (SPECS, P()), P(), axis_names={"model"})


def gradients(function: MLP, params: Params, x: Tensor, target: Tensor) -> tuple[tuple[Params, Tensor], Tensor]:
    """The gradients of parameters and input, and the loss."""

    def loss(params: Params, x: Tensor) -> Tensor:
        return (function(params, x) - target).square().sum()

    return torch.func.grad_and_value(loss, (0, 1))(params, x)


def make_step(mesh: spmd.Mesh, function: MLP) -> Any:
    """The jitted loss and gradients of an MLP of global values."""

    def step(params: Params, x: Tensor, target: Tensor) -> tuple[tuple[Params, Tensor], Tensor]:
        return gradients(function, params, x, target)

    return spmd.jit(step, (SPECS, BATCH, BATCH), ((SPECS, BATCH), P()), mesh=mesh)


def init(width: int = 256, batch: int = 512, seed: int = 0) -> tuple[Params, Tensor, Tensor]:
    """Parameters, input and target, on one device."""
    generator = torch.Generator().manual_seed(seed)
    up, down = torch.randn(width, 4 * width, generator=generator), torch.randn(4 * width, width, generator=generator)
    x, target = (torch.randn(batch, width, generator=generator) for _ in range(2))
    return {"up": up / width**0.5, "down": down / (4 * width) ** 0.5}, x, target


def main(arguments: list[str] | None = None) -> int:
    """Run both, and compare with one device; the exit status is 1 if bytes or numbers differ."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(arguments)
    console = report.make_console()
    strategy = Strategy({"data": 2, "model": 4})
    mesh = spmd.make_mesh(strategy.mesh_of(spmd.process_count()) if spmd.is_distributed() else strategy.mesh)
    console.print(f"{mesh}: loss and gradients of an MLP")
    found = [run(console, mesh, name, function) for name, function in (("by hand", by_hand(mesh)), ("by jit", mlp))]
    return int(len({sent for sent, _ in found}) > 1 or max(worst for _, worst in found) > TOLERANCE)


def run(console: Console, mesh: spmd.Mesh, name: str, function: MLP) -> tuple[float, float]:
    """Run one step and print its collectives; the bytes that it sends, and its difference from one device."""
    arguments = init()
    step = make_step(mesh, function)
    plan = step.plan(*arguments)
    console.print(f"\n{name}: {step.lower(*arguments).count()}")
    for comm in plan.comms:
        console.print(f"  {comm}", soft_wrap=True, highlight=False)
    got, expected = (optree.tree_leaves(tree) for tree in (step(*arguments), gradients(mlp, *arguments)))
    pairs = zip(got, expected, strict=True)
    worst = max(((x.full_tensor() - want).abs().max() / want.abs().max()).item() for x, want in pairs)
    sent = sum(comm.bytes for comm in plan.comms)
    console.print(f"  {report.size(sent)} in all; numbers differ from one device's by {worst:.0e} of the largest")
    return sent, worst


if __name__ == "__main__":
    raise SystemExit(main())
