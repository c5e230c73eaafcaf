"""Specs that do not fit."""

from __future__ import annotations

import torch
from mistake import MESH, Mistake, collector

import spmd
from spmd import P, Replicate, Shard

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("An axis that the mesh lacks", "has axes 'data', 'model'")
def unknown_axis() -> None:
    step = spmd.jit(torch.sin, P("batch"), mesh=MESH)
    step(torch.ones(8))


@mistake("A spec of two dims for a vector", "Shorten the spec")
def too_many_dims() -> None:
    step = spmd.jit(torch.sin, P("data", "model"), mesh=MESH)
    step(torch.ones(8))


@mistake("One axis for two dims", "An axis can shard one dim")
def axis_twice() -> None:
    P("data", "data")


@mistake("An axis name in place of a spec", "Write P('data')")
def no_p() -> None:
    step = spmd.jit(torch.sin, "data", mesh=MESH)
    step(torch.ones(8))


@mistake("Placements for one axis of two", "one placement for each of the 2 axes")
def one_placement() -> None:
    spmd.distribute(torch.ones(8), (Shard(0),), MESH)


@mistake("Shard(2) of a matrix", "shards a dim that the tensor f32[8,4] lacks")
def dim_that_is_not() -> None:
    spmd.distribute(torch.ones(8, 4), (Shard(2), Replicate()), MESH)


@mistake("A pending mean", "must be one of sum, max, min")
def mean_partial() -> None:
    P(partial={"data": "mean"})


@mistake("A DTensor with another spec than in_specs", "Pass value.redistribute(P('data'))")
def other_spec() -> None:
    step = spmd.jit(torch.sin, P("data"), mesh=MESH)
    x = spmd.distribute(torch.ones(8, 4), P(None, "model"), MESH)
    step(x)


@mistake("A sharded spec for a scalar result", "Shorten the spec")
def scalar_result() -> None:
    loss = spmd.jit(lambda x: x.sum(), P("data"), P("data"), mesh=MESH)
    loss(torch.ones(8))


@mistake("comms='error' where the specs make communication", "or allow it: comms='allow'")
def forbidden_communication() -> None:
    loss = spmd.jit(lambda x: x.sum(), P("data"), P(), mesh=MESH, comms="error")
    loss(torch.ones(8))
