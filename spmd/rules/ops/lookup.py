"""Lookups in a sharded dim, for the local implementations of operators on sharded vocabularies and classes.

Each rank holds all positions, so each one refuses those that are out of range of the global dim, as one device does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.core.placement import neutral_element
from spmd.rules.ops.one_dim import resized
from spmd.rules.rule import Axes

LookUp: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""One of torch's lookups, `look_up(table, index)`: the items of a tensor with one dim at positions of any shape."""


def shard_starts(index: Tensor, size: int, axes: Axes, look_up: LookUp) -> Tensor:
    """The start of this rank's shard, once for each position.

    It is looked up: torch's operator refuses what is out of range with its own error, on a GPU with its own assertion
    that nothing waits for; and as the lookup needs the result, no pass removes the check. The table takes no memory.

    Args:
        index: the global positions.
        size: the global length of the dim.
        axes: the mesh axes that the dim is sharded over.
        look_up: the operator whose error one device raises.
    """
    start = shard_offset(size, axes).to(index.device)  # in a trace, it is on the CPU
    return look_up(start.expand(size), index)


def look_up_rows(table: Tensor, index: Tensor) -> Tensor:
    """The lookup of an embedding."""
    return table.index_select(0, index.reshape(-1)).reshape(index.shape)


def look_up_items(table: Tensor, index: Tensor) -> Tensor:
    """The lookup of a gather."""
    return table.gather(0, index.reshape(-1)).reshape(index.shape)


def local_index(index: Tensor, start: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Convert global positions in a sharded dim to positions in this rank's shard.

    Args:
        index: the global positions.
        start: the start of this rank's shard.
        length: the length of this rank's shard.

    Returns:
        The local positions, 0 where the shard does not have the element, and a mask, True where it has.
    """
    local = index - start
    held = (local >= 0) & (local < length)
    return torch.where(held, local, torch.zeros_like(local)), held


def filled(x: Tensor, dim: int) -> Tensor:
    """`x`, or zeros of length 1 in `dim` if it is empty there, so that it can be indexed.

    A rank with an empty shard runs the same operators as the others, so that all ranks run the same collectives.
    """
    return x if x.shape[dim] else x.new_zeros(resized(x.shape, dim, 1))


def missing(x: Tensor) -> Tensor:
    """The neutral element of a sum, for elements of other ranks, shaped as `x`."""
    return torch.full_like(x, neutral_element("sum", x.dtype))


def pick(x: Tensor, dim: int, index: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """`x.gather(dim, index)` for global positions `index`, and a mask, True where this rank's shard has the element.

    Args:
        x: this rank's shard.
        dim: the sharded dim, nonnegative.
        index: the global positions.
        start: the start of this rank's shard, once for each position.
    """
    local, held = local_index(index, start, x.shape[dim])
    return filled(x, dim).gather(dim, local), held
