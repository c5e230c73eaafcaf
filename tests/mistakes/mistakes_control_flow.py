"""Decisions, loops and shapes by the values of tensors."""

from __future__ import annotations

import torch
from mistake import MESH, Mistake, collector

import spmd

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("`if` on the value of a tensor", "torch.where(condition, a, b)")
def branch() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # here
            return x
        return -x

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("`while` until a tensor is small", "torch.where(condition, a, b)")
def while_loop() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        while (x.abs() > 0.1).all():  # here
            x = x / 2
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("`in` a list of tensors", "torch.where(condition, a, b)")
def membership() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        seen = [x + 1]
        return x if x in seen else -x  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("range() of a tensor", "pass the number as a static argument")
def loop_length() -> None:
    def step(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        for _ in range(n):  # here
            x = x.sin()
        return x

    spmd.jit(step, mesh=MESH)(torch.ones(4), torch.tensor(3))


@mistake("A slice that ends where a tensor says", "static_argnums")
def slice_end() -> None:
    def step(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x[:n]  # here

    spmd.jit(step, mesh=MESH)(torch.ones(4), torch.tensor(3))


@mistake("Indexing by a mask", "Use torch.where(mask, x, 0) instead of x[mask]")
def boolean_index() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("nonzero()", "torch.nonzero_static")
def nonzero() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.nonzero()  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("unique()", "x.sort().values")
def unique() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.unique(x)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("Python's max of two tensors", "torch.where(condition, a, b)")
def python_max() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return max(x.sum(), x.prod())  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("A scan whose carry changes its dtype", ".to(torch.float32) of what comes back")
def carry_dtype() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return spmd.scan(lambda total, row: (total + row.double(), None), torch.zeros(4), x)[0]  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))
