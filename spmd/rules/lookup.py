"""Looking up positions in a sharded dim: what local bodies for sharded vocabularies and classes share."""

from __future__ import annotations

import torch

from spmd.collectives import shard_offset


def local_index(
    index: torch.Tensor, size: int, length: int, axes: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global positions in a dim of `size`, cut over `axes`, as positions in this rank's shard of `length`.

    Returns the local positions, 0 where the shard does not hold the element, and the mask of where it does.
    """
    local = index - shard_offset(size, axes)
    held = (local >= 0) & (local < length)
    return torch.where(held, local, torch.zeros_like(local)), held


def filled(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x`, or zeros of length 1 in `dim` if it is empty there, so that there is something to index.

    A rank that holds nothing takes the same steps as the others: they must run the same primitives.
    """
    return x if x.shape[dim] else x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])


def pick(x: torch.Tensor, dim: int, index: torch.Tensor, size: int, axes: tuple[str, ...]) -> torch.Tensor:
    """`x.gather(dim, index)` for a shard `x` of a tensor of `size` in `dim`; zero where it lacks the element."""
    local, held = local_index(index, size, x.shape[dim], axes)
    picked = filled(x, dim).gather(dim, local)
    return torch.where(held, picked, torch.zeros_like(picked))
