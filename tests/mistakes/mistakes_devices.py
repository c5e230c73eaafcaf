"""Devices and dtypes."""

from __future__ import annotations

import torch
from mistake import MESH, Mistake, collector

import spmd

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("A weight in float64", "disable_jit")
def float64_weight() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w  # here

    spmd.jit(layer, mesh=MESH)(torch.ones(8, 4), torch.ones(4, 4, dtype=torch.float64))


@mistake("A bfloat16 input to a float32 layer", "must have the same dtype")
def bfloat16_input() -> None:
    layer = torch.nn.Linear(4, 4)
    step = spmd.jit(lambda x: layer(x), mesh=MESH)  # here
    step(torch.ones(8, 4, dtype=torch.bfloat16))


@mistake("A product of matrices that do not fit", "[8, 4] X [8, 4]")
def wrong_shapes() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return x @ x  # here

    spmd.jit(layer, mesh=MESH)(torch.ones(8, 4))


@mistake("A meta tensor in a call", "Meta tensors serve .trace, .plan and .lower")
def meta_argument() -> None:
    step = spmd.jit(torch.sin, mesh=MESH)
    step(torch.empty(4, device="meta"))


@mistake("A device that torch does not know", "must be one of torch's, as 'cpu' or 'cuda'")
def no_such_device() -> None:
    spmd.make_mesh({"data": 2}, runtime="virtual", device="gpu")


@mistake("A GPU that is not there", "Pass another device")
def no_such_gpu() -> None:
    spmd.make_mesh({"data": 2}, runtime="virtual", device="cuda:99")


@mistake("The mean of integers", "must be either a floating point or complex dtype")
def mean_of_integers() -> None:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.mean()  # here

    spmd.jit(mean, mesh=MESH)(torch.arange(8))


@mistake("Indices that are floats", "one of the following scalar types: Long, Int")
def float_indices() -> None:
    def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, table)  # here

    spmd.jit(embed, mesh=MESH)(torch.ones(4), torch.ones(8, 4))


@mistake("A tensor that the function makes elsewhere", "on the same device")
def other_device() -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(4, device="meta")  # here

    spmd.jit(add, mesh=MESH)(torch.ones(4))


@mistake("A sparse tensor", "Pass it as .to_dense()")
def sparse_argument() -> None:
    step = spmd.jit(torch.sin, mesh=MESH)
    step(torch.ones(4).to_sparse())
