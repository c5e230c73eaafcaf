"""Pytrees of arguments, results and specs."""

from __future__ import annotations

import torch
from mistake import MESH, Mistake, collector

import spmd
from spmd import P

MISTAKES: list[Mistake] = []
mistake = collector(MISTAKES)


@mistake("in_specs with another key", "expected one spec or a dict with keys 'w'")
def wrong_key() -> None:
    step = spmd.jit(lambda params: params["w"].sin(), ({"weight": P("data")},), mesh=MESH)
    step({"w": torch.ones(4)})


@mistake("More in_specs than arguments", "expected one spec or a tuple of 1")
def too_many_specs() -> None:
    step = spmd.jit(torch.sin, (P("data"), P()), mesh=MESH)
    step(torch.ones(4))


@mistake("out_specs of another structure", "expected one spec or a dict with keys 'loss'")
def wrong_result() -> None:
    step = spmd.jit(lambda x: {"loss": x.sum()}, P("data"), (P(), P()), mesh=MESH)
    step(torch.ones(4))


@mistake("A function among the tensors of a batch", "static_argnums")
def function_in_batch() -> None:
    step = spmd.jit(lambda batch: batch["augment"](batch["x"]), mesh=MESH)
    step({"x": torch.ones(4), "augment": torch.sin})


@mistake("An object of an own class as state", "register State with optree")
def object_as_state() -> None:
    class State:
        w = torch.ones(4)

    step = spmd.jit(lambda state: state.w.sin(), mesh=MESH)
    step(State())


@mistake("A function in the result", "Return tensors, numbers or text")
def function_as_result() -> None:
    step = spmd.jit(lambda x: {"y": x.sin(), "backward": torch.cos}, mesh=MESH)
    step(torch.ones(4))


@mistake("A generator of tensors", "Pass a list or a tuple")
def generator() -> None:
    step = spmd.jit(lambda xs: sum(xs), mesh=MESH)
    step(x for x in [torch.ones(4)])


@mistake("A call without an argument", "missing a required argument: 'y'")
def missing_argument() -> None:
    step = spmd.jit(lambda x, y: x + y, mesh=MESH)
    step(torch.ones(4))


@mistake("A pattern that matches no parameter", "Paths: 'bias', 'weight'")
def pattern_without_match() -> None:
    spmd.specs(torch.nn.Linear(2, 2), {"*.kernel": P("model")})


@mistake("An optimizer as argument", "as spmd.optim does")
def optimizer_as_argument() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    step = spmd.jit(lambda x, optimizer: x.sin(), mesh=MESH)
    step(torch.ones(4), optimizer)
