"""The type of a per-rank value along a mesh axis: what its copies on the ranks have to do with each other.

The types are those of JAX's `shard_map` (`jax.typeof(x).vma`, `unreduced` and `reduced`).
"""

from __future__ import annotations

from enum import Enum


class AxisType(str, Enum):
    """The type of a value along one mesh axis.

    >>> AxisType.UNREDUCED.of_cotangent, AxisType.VARYING.of_cotangent
    (AxisType.REDUCED, AxisType.VARYING)
    """

    INVARIANT = "invariant"
    """The same on all ranks along the axis. So is its cotangent."""
    VARYING = "varying"
    """It may differ between ranks."""
    UNREDUCED = "unreduced"
    """Each rank holds one summand of the value."""
    REDUCED = "reduced"
    """The same on all ranks, and each rank holds one summand of its cotangent."""

    @property
    def of_cotangent(self) -> AxisType:
        """The type of the cotangent of a value of this type."""
        return _COTANGENTS.get(self, self)

    def __repr__(self) -> str:
        return f"AxisType.{self.name}"

    def __str__(self) -> str:
        return self.value


_COTANGENTS = {AxisType.UNREDUCED: AxisType.REDUCED, AxisType.REDUCED: AxisType.UNREDUCED}
