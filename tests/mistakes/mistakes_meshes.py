"""Meshes and their axes."""

from __future__ import annotations

import torch
from mistake import MESH, Mistake, collector

import spmd
from spmd import P

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("No mesh at all", "Pass mesh=... or enter `with spmd.use_mesh(mesh):`")
def no_mesh() -> None:
    step = spmd.jit(torch.sin)
    step(torch.ones(4))


@mistake("A dict in place of a mesh", "Make one: spmd.make_mesh")
def dict_as_mesh() -> None:
    spmd.jit(torch.sin, mesh={"data": 2})


@mistake("The mesh by position", "Write mesh=mesh")
def mesh_by_position() -> None:
    spmd.jit(torch.sin, P(), P(), MESH)


@mistake("Sizes without names", "make_mesh({'data': 2, 'model': 4})")
def sizes_without_names() -> None:
    spmd.make_mesh((2, 4))


@mistake("-1 for what is left", "must have a positive integer size")
def wildcard_size() -> None:
    spmd.make_mesh({"data": -1}, runtime="virtual")


@mistake("Arguments on two meshes", "Place it with spmd.distribute")
def two_meshes() -> None:
    x = spmd.distribute(torch.ones(4), P(), MESH)
    y = spmd.distribute(torch.ones(4), P(), spmd.make_mesh({"data": 4}, runtime="virtual"))
    step = spmd.jit(lambda x, y: x + y, mesh=MESH)
    step(x, y)


@mistake("A call on an abstract mesh", "runtime='virtual'")
def abstract_mesh() -> None:
    mesh = spmd.make_mesh({"data": 1024}, runtime="abstract")
    step = spmd.jit(torch.sin, mesh=mesh)
    step(torch.ones(4))


@mistake("A distributed mesh without torchrun", "Start the script by `torchrun")
def no_torchrun() -> None:
    spmd.make_mesh({"data": 2}, runtime="distributed")


@mistake("A collective outside of shard_map", "Use collectives inside spmd.shard_map")
def collective_outside() -> None:
    spmd.collectives.psum(torch.ones(4), "data")


@mistake("A collective over an axis that the mesh lacks", "are 'data', 'model'")
def collective_over_no_axis() -> None:
    total = spmd.shard_map(lambda x: spmd.collectives.psum(x, "batch"), MESH, P("data"), P())  # here
    total(torch.ones(8))
