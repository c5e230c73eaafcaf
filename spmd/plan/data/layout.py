"""From the plan's logical dims to the tensors that a rank really holds.

A value's *physical* dim may be made of several atoms, any of which can be sharded; a rank holds its logical shard,
flattened. `[b * s, d]` with `s` sharded over four ranks is locally `[b * (s / 4), d]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from spmd.core.mesh import Coordinate
from spmd.core.spec import DTensorSpec
from spmd.rules.strategy import LogicalShape


@attrs.frozen
class Layout:
    """How one value lies on the mesh: a spec over its logical dims, and the physical dims that they make up."""

    spec: DTensorSpec
    atoms: LogicalShape

    def logical_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The shape of the shard at a coordinate, one dim an atom."""
        return self.spec.local_shape(coordinate)

    def shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The shape of the shard at a coordinate, as the rank holds it."""
        return regroup(self.spec.local_shape(coordinate), self.atoms)

    def without(self, axes: Sequence[str]) -> Layout:
        """The layout with the mesh axes `axes` replicated."""
        dims = tuple(tuple(axis for axis in dim if axis not in axes) for dim in self.spec.dims)
        partial = tuple((axis, op) for axis, op in self.spec.partial if axis not in axes)
        return attrs.evolve(self, spec=DTensorSpec(self.spec.mesh, dims, partial, self.spec.meta))

    def __str__(self) -> str:
        parts = []
        axes = iter(self.spec.dims)
        for group in self.atoms:
            parts.append(_dim_text([(size, next(axes)) for size in group]))
        while parts and parts[-1] == "None":
            parts.pop()
        if self.spec.partial:
            parts.append(f"partial={dict(self.spec.partial)!r}")
        return f"P({', '.join(parts)})"


def _dim_text(dim: list[tuple[int, tuple[str, ...]]]) -> str:
    """One physical dim as in a `P`; where an inner atom is sharded, its atoms: `(4·16@model)`."""
    dim = [(size, axes) for size, axes in dim if size != 1 or axes]
    if not any(axes for _, axes in dim):
        return "None"
    if not any(axes for _, axes in dim[1:]):
        axes = dim[0][1]
        return repr(axes[0] if len(axes) == 1 else axes)
    return "(" + "·".join(str(size) + (f"@{'@'.join(axes)}" if axes else "") for size, axes in dim) + ")"


def regroup(shape: Sequence[int], atoms: LogicalShape) -> tuple[int, ...]:
    """The physical shape of a logical shape."""
    sizes = iter(shape)
    return tuple(math.prod(next(sizes) for _ in group) for group in atoms)
