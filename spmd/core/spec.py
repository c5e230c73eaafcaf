"""Specs: how a tensor is sharded over a mesh.

`DTensorSpec.dims[d]` is the ordered tuple of mesh axes that shard tensor dim `d`, major first, as in Shardy: the order
of the axes determines the order of the shards. A dim is split as by `torch.chunk` along each of its axes in turn, so
sizes need not be divisible and a rank may hold an empty shard.

The representation is that of Shardy (https://github.com/openxla/shardy), the notation that of JAX's `PartitionSpec`.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import NoneType
from typing import Any, TypeAlias

import attrs
import torch

from spmd.core.mesh import Coordinate, Mesh
from spmd.core.pictures.blocks import Blocks, Dim
from spmd.core.pictures.picture import Picture
from spmd.core.placement import (
    REDUCTIONS,
    Partial,
    Placement,
    Reduction,
    Replicate,
    Shard,
    neutral_element,
    supports_reduction,
)
from spmd.errors import ShardingError
from spmd.job.tracebacks import hides_internals

Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""For each tensor dim, the mesh axes that shard it, major first."""

Reductions: TypeAlias = tuple[tuple[str, Reduction], ...]
"""The mesh axes over which a reduction of the value is pending, each with the reduction; sorted by axis name."""

_DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def _as_shape(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(shape)


@attrs.frozen(cache_hash=True)
class TensorMeta:
    """The global shape and dtype of a tensor.

    >>> str(TensorMeta((8, 6), torch.float32))
    'f32[8,6]'
    """

    shape: tuple[int, ...] = attrs.field(converter=_as_shape)
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the global tensor in bytes."""
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The meta of a tensor."""
        return cls(tensor.shape, tensor.dtype)

    def __str__(self) -> str:
        name = _DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}[{','.join(map(str, self.shape))}]"


NESTED = (
    "a nested tensor, whose rows have lengths of their own, and programs have static shapes. Pass "
    "torch.nested.to_padded_tensor(x, 0.0) and the lengths, of which the function makes a mask."
)

QUANTIZED = "quantized, and DTensors are not. Pass it as .dequantize()."


def has_meta(leaf: Any) -> bool:
    """Test for a shape and a torch dtype: a tensor, or a stand-in such as `TensorMeta`.

    Raises:
        ShardingError: a nested tensor, which has no shape.
    """
    try:
        return hasattr(leaf, "shape") and isinstance(getattr(leaf, "dtype", None), torch.dtype)
    except RuntimeError:
        raise ShardingError(f"An argument or a result is {NESTED}") from None


@attrs.frozen(init=False)
class P:
    """A partition spec: for each tensor dim, the mesh axes that shard it, as in JAX's PartitionSpec.

    The tensor is replicated along axes that are not named: `P()` is a fully replicated tensor. Trailing Nones make no
    difference. A tuple of axes is major first. `partial` maps axes to the reduction that is pending over them. All
    axes of one spec have the same pending reduction, because a sum over one axis and a max over another do not
    commute.

    Raises:
        ShardingError: an axis used twice, an unknown reduction, two different reductions, or a dim that is neither an
            axis name, nor a tuple of them, nor None.

    >>> P("data", None, ("x", "y"), partial={"model": "sum"})
    P('data', None, ('x', 'y'), partial={'model': 'sum'})
    >>> P("data", None) == P("data"), P().dims
    (True, ())
    """

    dims: Dims
    partial: Reductions

    @hides_internals
    def __init__(self, *dims: str | Sequence[str] | None, partial: Mapping[str, Reduction] | None = None) -> None:
        parsed = tuple(_parse_dim(dim) for dim in dims)
        while parsed and not parsed[-1]:
            parsed = parsed[:-1]
        if not isinstance(partial, (Mapping, NoneType)):
            raise ShardingError(f"partial must map mesh axes to reductions, as {{'model': 'sum'}} (got {partial!r}).")
        reductions = _parse_partial(partial or {})
        _check_axes(parsed, reductions)
        self.__attrs_init__(parsed, reductions)  # type: ignore[attr-defined]

    @classmethod
    def from_placements(cls, placements: Sequence[Placement], mesh: Mesh) -> P:
        """The spec that has these placements, one per mesh axis in mesh order.

        Where several axes shard one dim, the earlier mesh axis is the major one, as in torch.

        Raises:
            ShardingError: a wrong number of placements, an item that is not a placement, or a negative dim.

        >>> from spmd.core.mesh import make_mesh
        >>> P.from_placements((Shard(1), Replicate()), make_mesh({"data": 2, "model": 4}, runtime="virtual"))
        P(None, 'data')
        """
        if len(placements) != len(mesh.names):
            raise ShardingError(
                f"Expected one placement for each of the {len(mesh.names)} axes of {mesh} (got {list(placements)})."
            )
        dims: dict[int, tuple[str, ...]] = {}
        partial: dict[str, Reduction] = {}
        for axis, placement in zip(mesh.names, placements, strict=True):
            if isinstance(placement, Shard):
                if placement.dim < 0:
                    raise ShardingError(f"Shard dims must not be negative in a spec (got {placement}).")
                dims[placement.dim] = (*dims.get(placement.dim, ()), axis)
            elif isinstance(placement, Partial):
                partial[axis] = placement.op
            elif not isinstance(placement, Replicate):
                raise ShardingError(
                    f"The placement on mesh axis {axis!r} must be spmd.Shard, spmd.Replicate or spmd.Partial "
                    f"(got {placement!r})."
                )
        ndim = max(dims, default=-1) + 1
        return cls(*(dims.get(dim, ()) for dim in range(ndim)), partial=partial)

    def __repr__(self) -> str:
        return _spec_text(self.dims, self.partial)


PartitionSpec = P
"""JAX's long name of `P`."""


class Free(enum.Enum):
    """The type of `FREE`."""

    FREE = "FREE"

    def __repr__(self) -> str:
        return "spmd.FREE"


FREE = Free.FREE
"""`jit(out_specs=FREE)`: the planner lays out all results, also those that go in again as arguments."""


def _parse_dim(dim: str | Sequence[str] | None) -> tuple[str, ...]:
    if dim is None:
        return ()
    if isinstance(dim, str):
        return (dim,)
    if isinstance(dim, (tuple, list)) and all(isinstance(axis, str) for axis in dim):
        return tuple(dim)
    raise ShardingError(f"Each dim of a P must be an axis name, a tuple of axis names, or None (got {dim!r}).")


def _parse_partial(partial: Mapping[str, Reduction] | Iterable[tuple[str, Reduction]]) -> Reductions:
    return tuple(sorted(partial.items() if isinstance(partial, Mapping) else partial))


def _check_axes(dims: Dims, partial: Reductions) -> None:
    """Check what can be checked without a mesh: no axis is used twice, and at most one known reduction is pending."""
    used = [axis for dim in dims for axis in dim] + [axis for axis, _ in partial]
    if len(set(used)) != len(used):
        repeated = next(axis for axis in used if used.count(axis) > 1)
        raise ShardingError(
            f"Mesh axis {repeated!r} is used twice in {_spec_text(dims, partial)}. "
            "An axis can shard one dim or be partial, once a spec."
        )
    for axis, op in partial:
        if op not in REDUCTIONS:
            raise ShardingError(
                f"partial[{axis!r}] must be one of {', '.join(REDUCTIONS)} (got {op!r}) in {_spec_text(dims, partial)}."
            )
    if len({op for _, op in partial}) > 1:
        raise ShardingError(
            f"{_spec_text(dims, partial)} waits for two different reductions, whose order would matter. "
            "Finish one before the other: a spec can be partial in one reduction, over any number of axes."
        )


def _spec_text(dims: Dims, partial: Reductions) -> str:
    names = [dim for dim, axes in enumerate(dims) if axes]
    shown = dims[: names[-1] + 1] if names else ()
    parts = [repr(None if not axes else axes[0] if len(axes) == 1 else axes) for axes in shown]
    if partial:
        parts.append(f"partial={dict(partial)!r}")
    return f"P({', '.join(parts)})"


@attrs.frozen(cache_hash=True)
class DTensorSpec:
    """The sharding of one tensor on one mesh, with the tensor's global shape and dtype; immutable and hashable.

    Args:
        mesh: the mesh.
        dims: for each of the tensor's dims, the mesh axes that shard it, major first.
        partial: the axes over which a reduction is pending, each with the reduction; sorted by axis name.
        meta: global shape and dtype.

    Raises:
        ShardingError: an axis that the mesh lacks or that is used twice, an unknown reduction, two different
            reductions, or a wrong number of dims.

    >>> from spmd.core.mesh import make_mesh
    >>> mesh = make_mesh({"data": 2, "model": 4}, runtime="virtual")
    >>> spec = DTensorSpec.make(mesh, P("model", "data"), TensorMeta((10, 6), torch.float32))
    >>> spec.placements, spec.local_shape((0, 0)), spec.local_shape((1, 3))
    ((Shard(1), Shard(0)), (3, 3), (1, 3))
    """

    mesh: Mesh
    dims: Dims
    partial: Reductions = attrs.field(converter=_parse_partial)
    meta: TensorMeta

    def __attrs_post_init__(self) -> None:
        _check_axes(self.dims, self.partial)
        for axis in [axis for dim in self.dims for axis in dim] + [axis for axis, _ in self.partial]:
            if axis not in self.mesh.names:
                raise ShardingError(
                    f"Unknown mesh axis {axis!r} in {_spec_text(self.dims, self.partial)}: {self.mesh} has axes "
                    f"{', '.join(map(repr, self.mesh.names))}."
                )
        if len(self.dims) != self.meta.ndim:
            raise ShardingError(
                f"{_spec_text(self.dims, self.partial)} names {len(self.dims)} dims but the tensor {self.meta} has "
                f"{self.meta.ndim}. Shorten the spec to the tensor's dims."
            )

    @classmethod
    def make(cls, mesh: Mesh, spec: P | Sequence[Placement], meta: TensorMeta) -> DTensorSpec:
        """The spec of a tensor `meta` from a `P`, or from one placement per mesh axis (where dims may be negative).

        Raises:
            ShardingError: the spec does not fit the mesh or the tensor, or the dtype does not support its reduction.
        """
        pspec = spec if isinstance(spec, P) else P.from_placements(_positive_dims(spec, meta), mesh)
        for axis, op in pspec.partial:
            if not supports_reduction(op, meta.dtype):
                raise ShardingError(
                    f"{pspec!r} cannot be partial over {axis!r}: {meta.dtype} has no {op} (tensor {meta}). "
                    "Reduce another dtype, or leave the axis out of partial."
                )
        return cls(mesh, pspec.dims + ((),) * (meta.ndim - len(pspec.dims)), pspec.partial, meta)

    @classmethod
    def replicated(cls, mesh: Mesh, meta: TensorMeta) -> DTensorSpec:
        """The spec of a tensor that is replicated on all ranks."""
        return cls(mesh, ((),) * meta.ndim, (), meta)

    @property
    def pspec(self) -> P:
        """The spec without mesh and meta."""
        return P(*self.dims, partial=dict(self.partial))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor, with no reduction pending."""
        return not self.partial and not any(self.dims)

    @property
    def complete(self) -> DTensorSpec:
        """The spec with no reduction pending."""
        return attrs.evolve(self, partial=())

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis, in mesh order; they do not tell the order of several axes that shard one dim."""
        return tuple(self.placement(axis) for axis in self.mesh.names)

    def placement(self, axis: str) -> Placement:
        """The placement along one mesh axis; MeshError if the mesh has no such axis."""
        self.mesh.axis_position(axis)
        for dim, axes in enumerate(self.dims):
            if axis in axes:
                return Shard(dim)
        op = dict(self.partial).get(axis)
        return Replicate() if op is None else Partial(op)

    def local_slices(self, coordinate: Coordinate) -> tuple[slice, ...]:
        """The shard of the rank at `coordinate`, as one slice of the global tensor per dim.

        Slices have start and stop, 0 <= start <= stop <= size; an empty shard has start == stop in some dim.
        """
        return _local_slices(self, coordinate)

    def local_shape(self, coordinate: Coordinate) -> tuple[int, ...]:
        """The shape of the shard of the rank at `coordinate`."""
        return tuple(part.stop - part.start for part in self.local_slices(coordinate))

    def neutral_at(self, coordinate: Coordinate) -> complex | float | int | bool | None:
        """What fills the shard at `coordinate` when a whole tensor is placed; None where it has the tensor's values.

        Along a partial axis the rank at index 0 has the values, and the others have the neutral element.
        """
        partial = (op for axis, op in self.partial if coordinate[self.mesh.axis_position(axis)] > 0)
        return next((neutral_element(op, self.meta.dtype) for op in partial), None)

    def local_bytes(self) -> int:
        """The size in bytes of the largest shard (the one at coordinate zero)."""
        return math.prod(self.local_shape((0,) * len(self.mesh.names))) * self.meta.dtype.itemsize

    @property
    def is_even(self) -> bool:
        """Whether every dim is divisible by the number of its shards, so that all shards have the same shape."""
        return all(size % self.mesh.axis_size(axes) == 0 for size, axes in zip(self.meta.shape, self.dims, strict=True))

    def __str__(self) -> str:
        return f"{self.meta} {self.pspec!r}"

    @property
    def picture(self) -> Picture:
        """Which rank holds which block of the tensor; see `spmd.visualize`."""
        pending = dict(self.partial)
        partial = tuple(axis for axis in self.mesh.names if axis in pending)
        reduction = pending[partial[0]] if partial else ""
        dims = tuple(_drawn(self, number) for number in range(self.meta.ndim))
        return Picture(Blocks(f"{self} on {self.mesh}", self.mesh.axes, self.mesh.ranks, dims, partial, reduction))

    def _repr_html_(self) -> str:
        return self.picture._repr_html_()


def _drawn(spec: DTensorSpec, number: int) -> Dim:
    """A dim and its chunks, for a picture."""
    size, axes = spec.meta.shape[number], spec.dims[number]
    counts = [spec.mesh.axis_size(axis) for axis in axes]
    indices = itertools.product(*map(range, counts))
    bounds = tuple(chunk_bounds(size, counts, index) for index in indices)
    split = f" by {', then '.join(axes)}" if axes else ""
    return Dim(f"dim {number} ({size}){split}", axes, bounds, tuple(f"{start}:{stop}" for start, stop in bounds))


def _positive_dims(placements: Sequence[Placement], meta: TensorMeta) -> tuple[Placement, ...]:
    for placement in placements:
        if isinstance(placement, Shard) and not -meta.ndim <= placement.dim < meta.ndim:
            raise ShardingError(
                f"{placement} in {list(placements)} shards a dim that the tensor {meta} lacks: it has {meta.ndim} dims."
            )
    return tuple(Shard(p.dim % meta.ndim) if isinstance(p, Shard) else p for p in placements)


def chunk_bounds(size: int, counts: Sequence[int], indices: Sequence[int]) -> tuple[int, int]:
    """Start and stop of one chunk of a dim that is split several times.

    A dim of length `size` is split into `counts[0]` chunks as by torch.chunk, its chunk `indices[0]` into `counts[1]`
    chunks, and so on. Chunks past the end are empty.

    >>> [chunk_bounds(5, (4,), (i,)) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    start, stop = 0, size
    for count, index in zip(counts, indices, strict=True):
        chunk = -(-(stop - start) // count)
        start, stop = min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop)
    return start, stop


@lru_cache(maxsize=65536)
def _local_slices(spec: DTensorSpec, coordinate: Coordinate) -> tuple[slice, ...]:
    slices = []
    for size, axes in zip(spec.meta.shape, spec.dims, strict=True):
        positions = [spec.mesh.axis_position(axis) for axis in axes]
        bounds = chunk_bounds(size, [spec.mesh.sizes[p] for p in positions], [coordinate[p] for p in positions])
        slices.append(slice(*bounds))
    return tuple(slices)
