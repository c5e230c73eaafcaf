"""Meshes and checks that tests of functions under `shard_map` have in common."""

from collections.abc import Callable
from typing import Any

import optree
import torch

import spmd
from spmd import P
from spmd.collectives.environment import axis_type, bound_axes

PAIR = spmd.make_mesh({"x": 2}, runtime="virtual")
LINE = spmd.make_mesh({"x": 4}, runtime="virtual")
EIGHT = spmd.make_mesh({"x": 8}, runtime="virtual")
GRID = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
WIDE = spmd.make_mesh({"x": 4, "y": 2}, runtime="virtual")
CUBE = spmd.make_mesh({"x": 2, "y": 2, "z": 2}, runtime="virtual")

HOW = ("outside", "inside")
"""A function of DTensors, which calls programs, and the same function as one program."""


def arange(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def call(how: str, function: Callable[..., Any], mesh: spmd.Mesh, specs: tuple[P, ...], *args: torch.Tensor) -> Any:
    """The function of tensors on the mesh, called outside of `jit` or as a jitted function."""
    if how == "inside":
        return spmd.jit(function, specs, mesh=mesh)(*args)
    return function(*(spmd.distribute(arg, spec, mesh) for arg, spec in zip(args, specs, strict=True)))


def whole(tree: Any) -> Any:
    """The tree with plain tensors for DTensors."""
    return optree.tree_map(lambda leaf: leaf.detach().full_tensor() if isinstance(leaf, spmd.DTensor) else leaf, tree)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(whole(actual), expected)


def spec_of(x: spmd.DTensor) -> P:
    return x.spec.pspec


def held(x: torch.Tensor) -> dict[str, str]:
    """The type of a value of a body along each manual axis where it is not invariant."""
    found = {axis: str(axis_type(x, axis)) for axis in bound_axes()}
    return {axis: kind for axis, kind in found.items() if kind != "invariant"}


def varying(*axes: str) -> dict[str, str]:
    return dict.fromkeys(axes, "varying")
