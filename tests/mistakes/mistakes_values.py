"""Values of tensors inside of jit, and tensors that leave it without being returned."""

from __future__ import annotations

import math

import numpy as np
import torch
from mistake import MESH, Mistake, collector

import spmd
from spmd import P

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake(".item() inside", "pass the number by static_argnums")
def item() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake('f"{loss:.3f}" inside', "spmd.debug.print")
def formatted() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = x.square().mean()
        print(f"loss {loss:.3f}")  # here
        return loss

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("A function of numpy inside", "keep to torch's operators")
def numpy_function() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(np.sin(x))  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake(".tolist() inside", "do this with the result")
def list_of_values() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(x.tolist())  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("math.sqrt of a tensor inside", "Keep it a tensor")
def math_function() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * math.sqrt(x.sum())  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("torch.testing.assert_close inside", "compare the results")
def compared_inside() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.testing.assert_close(x, x + 1)  # here
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("A tensor that was kept in a list, and added to one outside", "Return it from the function")
def leaked_and_added() -> None:
    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.sum())
        return x * 2

    spmd.jit(step, mesh=MESH)(torch.ones(4))
    torch.zeros(()) + kept[0]


@mistake(".item() of a tensor that was kept", "Return it from the function")
def leaked_and_read() -> None:
    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.sum())
        return x * 2

    spmd.jit(step, mesh=MESH)(torch.ones(4))
    kept[0].item()


@mistake("torch.tensor of tensors", "Use torch.stack")
def tensor_of_tensors() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([x.sum(), x.mean()])  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("A plain tensor added to a DTensor", "spmd.distribute")
def plain_operand() -> None:
    x = spmd.jit(torch.sin, P("data"), mesh=MESH)(torch.ones(4))
    x + torch.ones(4)
