"""A program of the proof: a jitted function with its arguments on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

import spmd
from spmd import P
from spmd.core.pytree import tree_map
from spmd.optim import AdamWState

SEED = 0

MACHINE = spmd.Machine(
    flops=4e10,
    memory_bandwidth=3e10,
    link_bandwidth=6e8,
    latency=3e-3,
    operator_latency=2e-6,
    overlap=0.1,
    fuses=False,
    origin="about four gloo processes on two cores",
)
"""What all programs are planned for: measured constants vary, and plans with them."""


@attrs.frozen(eq=False)
class Case:
    """A program of certain sizes on a mesh.

    Args:
        jit: the jitted function, with further options of `spmd.jit`.
        arguments: makes new arguments on the mesh, as `jit` takes them.
    """

    jit: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]


Program = Callable[[int, bool], Case]
"""From the number of ranks, and whether all shards are equal, to the case."""


def random_like(tree: Any) -> Any:
    """A tree of tensors in the shapes and dtypes of another, the same on all ranks: normal, or integers below 8."""
    generator = torch.Generator().manual_seed(SEED)

    def new(leaf: Any) -> Tensor:
        if leaf.dtype.is_floating_point:
            return (torch.randn(leaf.shape, generator=generator) * 0.1).to(leaf.dtype)
        return torch.randint(8, leaf.shape, generator=generator).to(leaf.dtype)

    return tree_map(new, tree)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the meta device, in place of an argument."""
    return torch.empty(shape, dtype=dtype, device="meta")


def adamw_spec(moments: Any) -> Any:
    """The specs of AdamW's state, whose moments have these specs."""
    return AdamWState(P(), moments, moments)


def case(
    function: Callable[..., Any], specs: tuple[Any, ...], out: Any, mesh: spmd.Mesh, like: Sequence[Any], **options: Any
) -> Case:
    """The case of a function of global values.

    Args:
        function: what is jitted.
        specs: for each argument.
        out: for the results.
        mesh: over which ranks.
        like: the arguments as trees of meta tensors.
        options: of `spmd.jit`.
    """
    return Case(
        lambda **more: spmd.jit(function, specs, out, mesh=mesh, **options, **more),
        lambda: spmd.distribute(random_like(tuple(like)), specs, mesh),
    )
