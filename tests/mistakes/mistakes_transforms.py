"""torch.func, autograd and torch.compile around and in jitted functions."""

from __future__ import annotations

import torch
from mistake import MESH, Mistake, collector

import spmd

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("The gradient of what is no scalar", "disable_jit")
def grad_of_vector() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: x * 2)(x)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("The gradient by integers", "only Tensors of floating point")
def grad_of_integers() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: (x * x).sum())(x)  # here

    spmd.jit(step, mesh=MESH)(torch.arange(4))


@mistake("vmap over dims of two sizes", "same size in the mapped dimension")
def vmap_sizes() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.mul)(x, x.T)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("Random numbers under vmap", "randomness")
def vmap_randomness() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: row + torch.rand(4))(x)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("`if` under vmap", "torch.where(condition, a, b)")
def vmap_branch() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda row: row if row.sum() > 0 else -row)(x)  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake(".item() of the loss under grad", "pass the number by static_argnums")
def item_under_grad() -> None:
    def loss(w: torch.Tensor) -> torch.Tensor:
        value = (w * w).sum()
        print("loss", value.item())  # here
        return value

    spmd.jit(torch.func.grad(loss), mesh=MESH)(torch.ones(4))


@mistake("A closed-over tensor on which grad acts", "Pass it as an argument")
def closes_over_transformed() -> None:
    def loss(w: torch.Tensor) -> torch.Tensor:
        step = spmd.jit(lambda x: x * w, mesh=MESH)  # here
        return step(torch.ones(4)).sum()

    torch.func.grad(loss)(torch.ones(4))


@mistake("requires_grad_() of a tensor of the outside", "torch.func.grad needs no flag")
def requires_grad_inside() -> None:
    w = torch.ones(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        w.requires_grad_()  # here
        return x * w

    spmd.jit(step, mesh=MESH)(torch.ones(4))


@mistake("torch.autograd.grad by an argument", "does not require grad")
def autograd_of_argument() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.square().sum(), x)[0]  # here

    spmd.jit(step, mesh=MESH)(torch.ones(8, 4))


@mistake("A jitted function of another mesh inside", "share one mesh")
def two_meshes_nested() -> None:
    inner = spmd.jit(torch.sin, mesh=spmd.make_mesh({"data": 8}, runtime="virtual"))
    step = spmd.jit(lambda x: inner(x), mesh=MESH)  # here
    step(torch.ones(8))
