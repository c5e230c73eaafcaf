"""One primitive of a redistribution, as data that can be priced, lowered and run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives.primitive import Collective, Primitive
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.placement import Reduction
from spmd.core.spec import DTensorSpec
from spmd.ir.comm import Sent


@attrs.frozen
class Step:
    """One primitive of a redistribution.

    Args:
        primitive: the primitive.
        axes: the mesh axes that it works along, major first.
        source, target: the specs before and after. Specs between the steps of a sequence have no axes of size 1.
        dims: the tensor dims that it changes: `(dim,)`, or `(split_dim, concat_dim)` of an all_to_all; else empty.
        op: the reduction of an all_reduce, reduce_scatter or to_partial.
        dtype: the dtype in which it reduces; None for that of the tensor.
    """

    primitive: Primitive
    axes: tuple[str, ...]
    source: DTensorSpec
    target: DTensorSpec
    dims: tuple[int, ...] = ()
    op: Reduction | None = None
    dtype: torch.dtype | None = None

    @property
    def kind(self) -> str:
        """The name of the primitive."""
        return self.primitive.name

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate."""
        return isinstance(self.primitive, Collective)

    @property
    def bytes(self) -> float:
        """The largest number of bytes that any rank sends, by the ring algorithm; 0 for a local step."""
        return _bytes(self, self.primitive) if isinstance(self.primitive, Collective) else 0.0

    @property
    def sent(self) -> Sent:
        """What a collective sends."""
        return self.kind, self.axes, self.bytes

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of what it sends."""
        return self.dtype or self.source.meta.dtype

    def arguments(self, coordinate: Coordinate) -> tuple[Any, ...]:
        """The primitive's arguments after the tensor, for the rank at `coordinate`."""
        assert self.primitive.arguments is not None, "only some primitives are steps"
        return (*self.primitive.arguments(self, self.target.local_shape(coordinate)), list(self.axes))

    def apply(self, x: Tensor, coordinate: Coordinate) -> Tensor:
        """Call the primitive on `x`, the shard under `source` of the rank at `coordinate`; returns the one of `target`.

        It has to be traced, or `x` a fake or meta tensor: with data, a runtime runs the primitive.
        """
        return self.primitive.op(x, *self.arguments(coordinate))

    def __str__(self) -> str:
        return f"{self.kind}[{', '.join(self.axes)}]: {self.source.pspec!r} -> {self.target.pspec!r}"


@lru_cache(maxsize=65536)
def _bytes(step: Step, collective: Collective) -> float:
    """`Step.bytes` of a collective: the largest in any group; that of coordinate zero has the largest shards."""
    if collective.step_bytes is not None:
        return collective.step_bytes(step)
    zero = (0,) * len(step.source.mesh.names)
    *args, _ = step.arguments(zero)
    counts, shape = axis_sizes(step.source.mesh, step.axes), step.source.local_shape(zero)
    return collective.most_bytes_sent(counts, shape, step.sent_dtype.itemsize, args)


def axis_sizes(mesh: Mesh, axes: Sequence[str]) -> tuple[int, ...]:
    """The number of ranks along each of some axes."""
    return tuple(mesh.axis_size(axis) for axis in axes)


def without_trivial(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Mesh axes without those of size 1, along which nothing is split or reduced."""
    return tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
