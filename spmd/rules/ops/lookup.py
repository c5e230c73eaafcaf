"""Lookups in a sharded dim, for the local implementations of operators on sharded vocabularies and classes."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.rules.rule import Axes


def local_index(index: Tensor, size: int, length: int, axes: Axes) -> tuple[Tensor, Tensor]:
    """Convert global positions in a sharded dim to positions in this rank's shard.

    Args:
        index: the global positions.
        size: the global length of the dim.
        length: the length of this rank's shard.
        axes: the mesh axes that the dim is sharded over.

    Returns:
        The local positions, 0 where the shard does not have the element, and a mask, True where it has.
    """
    local = index - shard_offset(size, axes)
    held = (local >= 0) & (local < length)
    return torch.where(held, local, torch.zeros_like(local)), held


def filled(x: Tensor, dim: int) -> Tensor:
    """`x`, or zeros of length 1 in `dim` if it is empty there, so that it can be indexed.

    A rank with an empty shard runs the same operators as the others, so that all ranks run the same collectives.
    """
    return x if x.shape[dim] else x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])


def pick(x: Tensor, dim: int, index: Tensor, size: int, axes: Axes) -> Tensor:
    """`x.gather(dim, index)` for global positions `index`; zero where this rank's shard does not have the element.

    Args:
        x: this rank's shard.
        dim: the sharded dim, nonnegative.
        index: the global positions.
        size: the global length of `dim`.
        axes: the mesh axes that `dim` is sharded over.
    """
    local, held = local_index(index, size, x.shape[dim], axes)
    picked = filled(x, dim).gather(dim, local)
    return torch.where(held, picked, torch.zeros_like(picked))
