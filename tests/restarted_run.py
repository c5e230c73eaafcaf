"""A run that torchrun restarts: rank 1 is killed once, in a step; the losses of all steps go to a file.

torchrun --nproc-per-node 2 --max-restarts 1 tests/restarted_run.py CHECKPOINT LOSSES KILLED_AT
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import optree
import torch
import torch.distributed as dist

import spmd
from spmd import P

STEPS = 6
SPECS = {"w1": P("data"), "w2": P(None, "data")}


def train_step(params: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A step of learning the identity."""

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return (torch.relu(x @ params["w1"]) @ params["w2"] - x).square().mean()

    grads, value = torch.func.grad_and_value(loss)(params)
    return optree.tree_map(lambda param, grad: param - 0.01 * grad, params, grads), value


def run(checkpoint: str, killed_at: int = -1) -> list[float]:
    """The losses of all steps, a checkpoint after each; rank 1 is killed in step `killed_at`."""
    mesh = spmd.make_mesh({"data": 2}, runtime="distributed")
    machine = spmd.Machine.preset("h100_nvlink")  # one measured with other numbers of threads may have another plan
    step = spmd.jit(train_step, (SPECS, P("data")), (SPECS, P()), mesh=mesh, machine=machine)
    generator = torch.Generator().manual_seed(0)
    params = {"w1": torch.randn(8, 16, generator=generator), "w2": torch.randn(16, 8, generator=generator)}
    batches = [torch.randn(4, 8, generator=generator) for _ in range(STEPS)]
    state = {"params": spmd.distribute(params, SPECS, mesh), "losses": torch.zeros(STEPS), "done": 0}
    if spmd.checkpoint.exists(checkpoint):
        state = spmd.checkpoint.load(checkpoint, state)
    for number in range(state["done"], STEPS):
        if number == killed_at and spmd.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        params, loss = step(state["params"], batches[number])
        losses = state["losses"].clone()
        losses[number] = loss.item()
        state = {"params": params, "losses": losses, "done": number + 1}
        spmd.checkpoint.save(state, checkpoint)
    return state["losses"].tolist()


if __name__ == "__main__":
    checkpoint, results, killed_at = sys.argv[1:]
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    found = run(checkpoint, int(killed_at) if is_first else -1)
    if spmd.process_index() == 0:
        Path(results).write_text(json.dumps([is_first, found]))
    dist.destroy_process_group()
