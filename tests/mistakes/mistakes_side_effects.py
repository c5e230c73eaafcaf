"""What a function does beside returning tensors."""

from __future__ import annotations

import io

import torch
from mistake import MESH, Mistake, collector

import spmd

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("A write to an argument", "write to a copy")
def writes_argument() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x += 1  # here
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("A write to a tensor of the outside", "state goes in and comes out")
def writes_closed_over() -> None:
    total = torch.zeros(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)  # here
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("loss.backward() with the parameters of a module", "torch.func.grad")
def calls_backward() -> None:
    model = torch.nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()  # here
        return loss

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("torch.manual_seed inside", "before")
def seeds() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return x + torch.rand(4)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("A generator of one's own", "Leave generator= out")
def own_generator() -> None:
    generator = torch.Generator()

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(4, generator=generator)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("Gradients that are kept in .grad", "Return it: torch.func.grad")
def sets_grad() -> None:
    w = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        w.grad = x * 2  # here
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("A parameter that gets new .data", "x.copy_(value)")
def sets_data() -> None:
    w = torch.nn.Parameter(torch.ones(4))

    def step(x: torch.Tensor) -> torch.Tensor:
        w.data = w - x  # here
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("A setting of torch that stays changed", "Make it before the call")
def sets_default_dtype() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)  # here
        return x + torch.ones(4)

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("Batch norm that updates its statistics", "state goes in and comes out")
def batch_norm() -> None:
    norm = torch.nn.BatchNorm1d(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return norm(x)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("torch.save inside", "save the result")
def saves_inside() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.save(x, io.BytesIO())  # here
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(4))
