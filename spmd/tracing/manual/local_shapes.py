"""The shapes of the results of a shard_map body on all ranks, and the global shapes that follow."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import attrs

from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import P, chunk_bounds
from spmd.errors import ShardingError
from spmd.ir.variants import Key, Unevenness

Shape = tuple[int, ...]


@attrs.frozen(eq=False)
class LocalShapes:
    """The shapes of all results, for each set of shapes of arguments.

    Args:
        unevenness: which ranks have equal shapes.
        shapes: the shapes of the results by the key of a rank.
    """

    unevenness: Unevenness
    shapes: Mapping[Key, Sequence[Shape]]

    def of(self, number: int, coordinate: Coordinate) -> Shape:
        """The shape of a result on the rank at a coordinate."""
        return self.shapes[self.unevenness.key(coordinate)][number]

    def global_shape(self, number: int, spec: P, name: str) -> Shape:
        """The global shape of a result with a spec.

        Args:
            number: the number of the result.
            spec: the spec with which it leaves.
            name: the result in messages.

        Raises:
            ShardingError: the ranks' shapes are not those of the chunks of one global tensor.
        """
        mesh, zero = self.unevenness.mesh, (0,) * len(self.unevenness.mesh.names)
        first = self.of(number, zero)
        dims = (*spec.dims, *((),) * (len(first) - len(spec.dims)))
        total = tuple(
            sum(self.of(number, place)[dim] for place in _along(mesh, axes)) if axes else first[dim]
            for dim, axes in enumerate(dims)
        )
        for coordinate in self.unevenness.coordinates():
            held, expected = self.of(number, coordinate), _chunk(mesh, total, dims, coordinate)
            if held != expected:
                raise ShardingError(
                    f"{name} has the shape {list(first)} on the rank at {zero} and {list(held)} on the one at "
                    f"{coordinate}. With {spec!r} these must be the chunks, as of torch.chunk, of one tensor: of "
                    f"{list(total)} the latter has {list(expected)}. Pad the shards to equal lengths."
                )
        return total


def even_shape(mesh: Mesh, spec: P, shape: Shape) -> Shape:
    """The global shape of a value of which each rank holds an equal shard."""
    counts = [mesh.axis_size(axes) for axes in spec.dims] + [1] * len(shape)
    return tuple(size * count for size, count in zip(shape, counts, strict=False))


def _along(mesh: Mesh, axes: Sequence[str]) -> list[Coordinate]:
    """The coordinates along some axes, at zero along all others."""
    ranges = [range(size if name in axes else 1) for name, size in mesh.axes.items()]
    return list(itertools.product(*ranges))


def _chunk(mesh: Mesh, shape: Shape, dims: Sequence[Sequence[str]], coordinate: Coordinate) -> Shape:
    lengths = []
    for size, axes in zip(shape, dims, strict=True):
        indices = [coordinate[mesh.axis_position(axis)] for axis in axes]
        start, stop = chunk_bounds(size, [mesh.axis_size(axis) for axis in axes], indices)
        lengths.append(stop - start)
    return tuple(lengths)
