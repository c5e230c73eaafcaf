"""The shards of all ranks, and numbers that depend on the rank, from those of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd.collectives import axis_index
from spmd.collectives.environment import resolve_axes
from spmd.core.spec import chunk_bounds
from spmd.rules.rule import Axes


def chunks(size: int, axes: Axes) -> list[tuple[int, int]]:
    """Where each rank's shard of a dim begins and ends, in rank order."""
    counts = resolve_axes(axes)[1]
    return [chunk_bounds(size, counts, index) for index in itertools.product(*map(range, counts))]


def by_rank(values: Sequence[int], axes: Axes, device: torch.device) -> Tensor | int:
    """This rank's of the values of all ranks along `axes`, which change in few places from one rank to the next."""
    steps = [after - before for before, after in itertools.pairwise(values)]
    found: Tensor | int = values[0]
    if any(steps):
        rank = axis_index(axes).to(device)
        for number, (before, after) in enumerate(itertools.pairwise([0, *steps])):
            if after != before:
                found = found + (rank - number).clamp(min=0) * (after - before)
    return found
