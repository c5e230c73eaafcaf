"""What ranks do in tests/api/test_full_tree.py."""

from __future__ import annotations

import torch

import spmd
from spmd import P
from spmd.collectives.distributed.agreement import gather
from spmd.errors import DivergenceError


def assembled(mesh: spmd.Mesh) -> None:
    """A tree with shards, a partial sum and other leaves is assembled."""
    whole = {"w": torch.arange(5.0), "layers": [torch.ones(2, 3)], "sum": torch.tensor(2.0)}
    specs = {"w": P("data"), "layers": [P(None, "data")], "sum": P(partial={"data": "sum"})}
    others = {"step": 3, "plain": torch.zeros(2)}
    placed = spmd.distribute(whole, specs, mesh)
    found = spmd.full_tree({**placed, **others})
    torch.testing.assert_close(found, {**whole, **others}, rtol=0, atol=0)
    assert found["plain"] is others["plain"] and type(found["w"]) is torch.Tensor


def compared_once(mesh: spmd.Mesh) -> list[str]:
    """The comparisons of ranks in one call."""
    placed = spmd.distribute({"a": torch.ones(4), "b": torch.ones(4)}, P("data"), mesh)
    seen: list[str] = []
    original = gather.__globals__["_gather"]

    def counted(call: str, *args: object) -> object:
        seen.append(call)
        return original(call, *args)

    gather.__globals__["_gather"] = counted
    try:
        spmd.full_tree(placed)
    finally:
        gather.__globals__["_gather"] = original
    return seen


def different_trees(mesh: spmd.Mesh) -> str:
    """The error where rank 1 has another spec."""
    x = spmd.distribute(torch.ones(4, 4), P("data"), mesh)
    y = x.redistribute(P(None, "data"))
    try:
        spmd.full_tree({"w": y if spmd.process_index() == 1 else x})
    except DivergenceError as error:
        message = str(error)
    assert 16.0 == x.full_tensor().sum().item()  # the next call works
    return message
