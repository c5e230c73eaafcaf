"""From the plan's logical dims to the local tensors of a rank.

A *physical* dim is a dim of the torch tensor. The planner splits it into atoms (`spmd.plan.search.atoms`), the
*logical* dims, each of which can be sharded. In the local tensor the sharded atoms of a physical dim are flattened into
one dim again: `[b * s, d]` with `s` sharded over four ranks is locally `[b * (s / 4), d]`.
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
    """The sharding of one value: a spec over its logical dims, and for each physical dim the sizes of its atoms.

    Along the mesh axes `manual` each rank holds a value of its own, and the spec says nothing.
    """

    spec: DTensorSpec
    atoms: LogicalShape
    manual: tuple[str, ...] = ()

    def logical_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The logical shape of the shard at a coordinate: one dim for each atom."""
        return self.spec.local_shape(coordinate)

    def shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The physical shape of the shard at a coordinate: that of the rank's torch tensor."""
        return regroup(self.spec.local_shape(coordinate), self.atoms)

    def without(self, axes: Sequence[str]) -> Layout:
        """This layout, but replicated over the mesh axes `axes`."""
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
        return f"P({', '.join(parts)})" + (f" per rank of {', '.join(self.manual)}" if self.manual else "")


def _dim_text(dim: list[tuple[int, tuple[str, ...]]]) -> str:
    """One physical dim, as `P` writes it; if an atom other than the first is sharded, all atoms: `(4·16@model)`."""
    dim = [(size, axes) for size, axes in dim if size != 1 or axes]
    if not any(axes for _, axes in dim):
        return "None"
    if not any(axes for _, axes in dim[1:]):
        axes = dim[0][1]
        return repr(axes[0] if len(axes) == 1 else axes)
    return "(" + "·".join(str(size) + (f"@{'@'.join(axes)}" if axes else "") for size, axes in dim) + ")"


def regroup(shape: Sequence[int], atoms: LogicalShape) -> tuple[int, ...]:
    """The physical shape of a logical shape: the product of each dim's atoms."""
    sizes = iter(shape)
    return tuple(math.prod(next(sizes) for _ in group) for group in atoms)
