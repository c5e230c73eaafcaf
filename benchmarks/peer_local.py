"""Without communication: a step on one rank by `spmd` and by eager and compiled torch, and the optimizer alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch

import gpt
import layouts
import spmd
from comms import workload_batch
from peer_model import Gpt, adam
from peer_steps import Comparison, SpmdStep, Step, Timing, first_line, in_turns, start
from spmd import P
from spmd.core.pytree import tree_leaves, tree_map
from spmd.optim import AdamWState, adamw
from training import Training

DECAY = 0.01
"""Weight decay where the optimizer is alone: torch's default."""

MORE = 30
"""How many times as often the optimizer is timed: it takes a millisecond, and longer in its first calls."""


def measure_local(config: gpt.Config, batch: int, rounds: int, compiled: bool, device: str = "cpu") -> list[Comparison]:
    """A step on the one rank of this job: `spmd` on a mesh of size 1, autograd, and, if asked for, `torch.compile`."""
    start()
    mesh = spmd.make_mesh({"data": 1}, runtime="distributed", device=device)
    data = workload_batch(config, batch)
    torchs = functools.partial(eager, config, data, device)
    peers: dict[str, Callable[[], Step]] = {
        f"eager, {kind}": functools.partial(torchs, kind) for kind in ("foreach", "fused")
    }
    if compiled:
        peers["torch.compile, fused"] = functools.partial(torchs, "fused", compiled=True)
    training = Training(config, layouts.STRATEGIES["dp"], mesh)
    pairs = _pairs(lambda: SpmdStep.of(training, data), peers, rounds)
    return [Comparison("one rank", config.width, batch, 1, ours, peer) for ours, peer in pairs]


def _pairs(
    ours: Callable[[], Step], peers: Mapping[str, Callable[[], Step]], rounds: int
) -> Iterator[tuple[Timing, dict[str, Timing]]]:
    """The times of our step and of each peer's, in turns of two: a third would change what both find in caches."""
    for name, make in peers.items():
        steps, failures = {"spmd": ours()}, {}
        try:
            steps[name] = make()
        except Exception as error:  # torch.compile without a compiler, for one
            failures[name] = Timing.failed(first_line(error))
        timings = in_turns(steps, rounds) | failures
        yield timings.pop("spmd"), timings


def eager(config: gpt.Config, batch: gpt.Batch, device: str, kind: str, *, compiled: bool = False) -> Step:
    """Torch's step on one device; compiled, it is the model with its loss that is."""
    model, batch = Gpt(config, gpt.init(config)).to(device), tree_map(lambda x: x.to(device), batch)
    optimizer = adam(model, kind)
    loss_of = torch.compile(model) if compiled else model

    def step() -> float:
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measure_optimizer(config: gpt.Config, rounds: int, device: str = "cpu") -> list[Comparison]:
    """AdamW alone on the one rank of this job, for the parameters of a model: jitted `spmd.optim.adamw` and torch's."""
    start()
    mesh = spmd.make_mesh({"data": 1}, runtime="distributed", device=device)
    peers: dict[str, Callable[[], Step]] = {
        f"torch.optim.AdamW, {kind}": functools.partial(torchs_adamw, config, device, kind)
        for kind in ("foreach", "fused")
    }
    pairs = _pairs(lambda: adamw_step(config, mesh), peers, MORE * rounds)
    return [Comparison("AdamW", config.width, 0, 1, ours, peer) for ours, peer in pairs]


def adamw_step(config: gpt.Config, mesh: spmd.Mesh) -> Step:
    """Jitted AdamW; what it returns for a loss is one number of the embeddings."""
    optimizer = adamw(lr=1e-3, weight_decay=DECAY)
    replicated = (P(), AdamWState(P(), P(), P()))
    update = spmd.jit(optimizer.step, (*replicated, P()), replicated, mesh=mesh, donate_argnums=(0, 1))
    params, grads = gpt.init(config), gradients(config)
    state = spmd.distribute((params, optimizer.init(params)), replicated, mesh)
    placed = spmd.distribute(grads, P(), mesh)

    def step() -> float:
        nonlocal state
        state = update(*state, placed)
        return state[0]["tokens"].to_local().view(-1)[0].item()

    return step


def torchs_adamw(config: gpt.Config, device: str, kind: str) -> Step:
    """The same by torch's optimizer, which writes to its parameters."""
    tree = tree_map(lambda leaf: leaf.to(device).requires_grad_(), gpt.init(config))
    params, tokens = tree_leaves(tree), tree["tokens"]
    for leaf, grad in zip(params, tree_leaves(gradients(config)), strict=True):
        leaf.grad = grad.to(device)
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=DECAY, **{kind: True})

    def step() -> float:
        optimizer.step()
        return tokens.detach().view(-1)[0].item()

    return step


def gradients(config: gpt.Config) -> gpt.Params:
    """Random gradients."""
    generator = torch.Generator().manual_seed(1)
    return tree_map(lambda leaf: torch.randn(leaf.shape, generator=generator), gpt.init(config))
