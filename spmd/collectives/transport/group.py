"""The ranks that take part in one collective."""

from __future__ import annotations

import itertools
from functools import lru_cache

import attrs

from spmd.core.mesh import Mesh
from spmd.core.spec import chunk_bounds


@attrs.frozen(cache_hash=True)
class Group:
    """Ranks that communicate with each other.

    Args:
        ranks: their numbers, in the order of their index along the axes.
        sizes: the sizes of the axes, major first.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def bounds(self, length: int) -> tuple[tuple[int, int], ...]:
        """Start and stop of every rank's chunk of a dim of this length, in group order."""
        return _bounds(length, self.sizes)

    def lengths(self, length: int) -> list[int]:
        """The length of every rank's chunk of a dim of this length, in group order."""
        return [stop - start for start, stop in self.bounds(length)]


@lru_cache(maxsize=4096)
def _bounds(length: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(chunk_bounds(length, sizes, index) for index in itertools.product(*map(range, sizes)))


@lru_cache(maxsize=4096)
def groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[Group, ...]:
    """All groups of ranks that differ only along `axes`.

    >>> from spmd.core.mesh import make_mesh
    >>> [group.ranks for group in groups(make_mesh({"data": 2, "model": 2}, runtime="virtual"), ("data",))]
    [(0, 2), (1, 3)]
    """
    sizes = tuple(mesh.axis_size(axis) for axis in axes)
    return tuple(Group(ranks, sizes) for ranks in mesh.groups(axes))


@lru_cache(maxsize=65536)
def group_of(mesh: Mesh, axes: tuple[str, ...], rank: int) -> tuple[Group, int]:
    """The group of a rank along `axes`, and the rank's index in it."""
    found = next(group for group in groups(mesh, axes) if rank in group.ranks)
    return found, found.ranks.index(rank)
