"""The programs of ranks whose shards in a manual region have other shapes: one program for each set of local shapes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import attrs

from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import DTensorSpec

Program = TypeVar("Program")
Key: TypeAlias = tuple[Any, ...]
"""The local shapes of a rank; ranks with equal keys have the same program."""


@attrs.frozen
class Unevenness:
    """What makes local shapes differ between ranks.

    Args:
        mesh: the mesh.
        specs: the uneven specs with which values enter manual regions.
        axes: mesh axes along which any two ranks may have other shapes, because a region is inside of an uneven one.
    """

    mesh: Mesh
    specs: tuple[DTensorSpec, ...]
    axes: tuple[str, ...] = ()

    def key(self, coordinate: Coordinate) -> Key:
        """The key of the rank at a coordinate."""
        indices = (coordinate[self.mesh.axis_position(axis)] for axis in self.axes)
        return (*(spec.local_shape(coordinate) for spec in self.specs), *indices)

    def coordinates(self) -> Iterator[Coordinate]:
        """One coordinate for each key, the first in rank order; coordinate zero comes first."""
        involved = {*self.axes, *(axis for spec in self.specs for dim in spec.dims for axis in dim)}
        ranges = [range(size if name in involved else 1) for name, size in self.mesh.axes.items()]
        seen = set()
        for coordinate in itertools.product(*ranges):
            key = self.key(coordinate)
            if key not in seen:
                seen.add(key)
                yield coordinate


@attrs.frozen(eq=False)
class Variants(Generic[Program]):
    """The programs of all ranks.

    Args:
        unevenness: tells which ranks share a program.
        graphs: for each key but that of coordinate zero, a coordinate and its program.
    """

    unevenness: Unevenness
    graphs: Mapping[Key, tuple[Coordinate, Program]]

    def at(self, coordinate: Coordinate) -> Program | None:
        """The program of the rank at a coordinate; None if it is that of coordinate zero."""
        found = self.graphs.get(self.unevenness.key(coordinate))
        return None if found is None else found[1]

    def map(self, function: Callable[[Program], Program]) -> Variants[Program]:
        """The variants with a function applied to each program."""
        return attrs.evolve(self, graphs={key: (c, function(graph)) for key, (c, graph) in self.graphs.items()})
