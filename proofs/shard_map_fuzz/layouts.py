"""Random shapes, and how values of these shapes are sharded over mesh axes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from proofs.shard_map_fuzz.builder import weighted
from proofs.shard_map_fuzz.program import Layout


def random_shape(rng: random.Random, mesh: Mapping[str, int], uneven: bool = False) -> tuple[int, ...]:
    """A shape with some dims that mesh axes divide; if `uneven`, most lengths are any."""
    found = []
    for _ in range(weighted(rng, {0: 0.0 if uneven else 0.4, 1: 2, 2: 4, 3: 1})):
        size = rng.choice([1, 1, 2, 3])
        if uneven and rng.random() < 0.7:
            found.append(rng.randint(1, 7))
            continue
        if rng.random() < 0.75:
            size *= rng.choice(list(mesh.values()))
        if rng.random() < 0.2:
            size *= rng.choice(list(mesh.values()))
        found.append(min(size, 16))
    return tuple(found)


def random_layout(
    rng: random.Random, shape: Sequence[int], sizes: Mapping[str, int], share: float = 0.6, uneven: bool = False
) -> Layout:
    """A spec that shards dims over some axes: evenly, unless `uneven`; rather not a dim of one element."""
    dims: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    for axis in rng.sample(list(sizes), len(sizes)):
        fits = [dim for dim, size in enumerate(left) if size % sizes[axis] == 0 or (uneven and size > 1)]
        if uneven and rng.random() < 0.15:
            fits = list(range(len(left)))
        if fits and rng.random() < share:
            dim = rng.choice(fits)
            dims[dim] = (*dims[dim], axis)
            left[dim] = -(-left[dim] // sizes[axis])
    return Layout(tuple(dims))
