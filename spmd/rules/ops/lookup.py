"""Looking up positions in a sharded dim: what local bodies for sharded vocabularies and classes share."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd.collectives import shard_offset
from spmd.rules.rule import Axes


def local_index(index: Tensor, size: int, length: int, axes: Axes) -> tuple[Tensor, Tensor]:
    """Global positions in a dim of `size`, cut over `axes`, as positions in this rank's shard of `length`.

    Returns the local positions, 0 where the shard does not hold the element, and the mask of where it does.
    """
    local = index - shard_offset(size, axes)
    held = (local >= 0) & (local < length)
    return torch.where(held, local, torch.zeros_like(local)), held


def filled(x: Tensor, dim: int) -> Tensor:
    """`x`, or zeros of length 1 in `dim` if it is empty there, so that there is something to index.

    A rank that holds nothing takes the same steps as the others: they must run the same primitives.
    """
    return x if x.shape[dim] else x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])


def pick(x: Tensor, dim: int, index: Tensor, size: int, axes: Axes) -> Tensor:
    """`x.gather(dim, index)` for a shard `x` of a tensor of `size` in `dim`; zero where it lacks the element."""
    local, held = local_index(index, size, x.shape[dim], axes)
    picked = filled(x, dim).gather(dim, local)
    return torch.where(held, picked, torch.zeros_like(picked))
