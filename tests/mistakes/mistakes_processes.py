"""Processes that do not do the same; each function runs on both ranks of a mesh."""

from __future__ import annotations

import torch
from mistake import Mistake, collector

import spmd
from spmd import P

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("Other shapes on one rank", "All ranks must call the same function")
def shapes(mesh: spmd.Mesh) -> None:
    batch = torch.ones(8 + 2 * spmd.process_index(), 4)
    step = spmd.jit(torch.sin, P("data"), mesh=mesh)
    step(batch)


@mistake("Other values of a plain tensor on one rank", "spmd.distribute(..., src_rank=0)")
def values(mesh: spmd.Mesh) -> None:
    batch = torch.full((8, 4), float(spmd.process_index()))
    step = spmd.jit(torch.cos, P("data"), mesh=mesh)
    step(batch)


@mistake("Another static argument on one rank", "All ranks must call the same function")
def static_arguments(mesh: spmd.Mesh) -> None:
    step = spmd.jit(lambda x, power: x**power, P("data"), mesh=mesh, static_argnums=1)
    step(torch.ones(8), 2 + spmd.process_index())


@mistake("Functions in another order on one rank", "All ranks must call the same function")
def order(mesh: spmd.Mesh) -> None:
    first, second = spmd.jit(torch.sin, mesh=mesh), spmd.jit(torch.cos, mesh=mesh)
    calls = [first, second] if spmd.process_index() == 0 else [second, first]
    for call in calls:
        call(torch.ones(4))  # here


@mistake("distribute() of tensors that differ", "src_rank")
def distributed_values(mesh: spmd.Mesh) -> None:
    weights = torch.randn(8, 4, generator=torch.Generator().manual_seed(spmd.process_index()))
    spmd.distribute(weights, P("data"), mesh)


@mistake("from_process_data of parts that must be equal", "load it from the same part of the data")
def parts(mesh: spmd.Mesh) -> None:
    batch = torch.full((4,), float(spmd.process_index()))
    spmd.from_process_data(batch, P(), mesh)


@mistake("A mesh of more ranks than there are processes", "Choose axes whose product is 2")
def too_large_mesh(mesh: spmd.Mesh) -> None:
    spmd.make_mesh({"data": 4}, runtime="distributed")


@mistake("A call on a mesh of other processes", "Guard what runs on the mesh")
def outside_of_mesh(mesh: spmd.Mesh) -> None:
    half = spmd.make_mesh({"data": 1}, ranks=[0])
    spmd.jit(torch.sin, mesh=half)(torch.ones(4))


@mistake("from_local of shards that do not fit", "must be f32[4,4]")
def wrong_shard(mesh: spmd.Mesh) -> None:
    shard = torch.ones(3 + 2 * spmd.process_index(), 4 + spmd.process_index())
    spmd.DTensor.from_local(shard, mesh, P("data"))


@mistake("Other seeds, and a function that draws", "call torch.manual_seed with one seed")
def generators(mesh: spmd.Mesh) -> None:
    torch.manual_seed(spmd.process_index())
    step = spmd.jit(lambda x: x + torch.rand(8), P("data"), mesh=mesh)
    step(torch.ones(8))
