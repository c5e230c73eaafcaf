"""The mesh axes, with their sizes, that per-rank code may name while it is traced."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

from spmd.errors import SpmdError

_axis_sizes: ContextVar[Mapping[str, int] | None] = ContextVar("spmd_axis_sizes", default=None)


@contextlib.contextmanager
def axis_environment(sizes: Mapping[str, int]) -> Iterator[None]:
    """Bind mesh axes for the collectives inside the `with` block; the axes of an outer block stay bound.

    Args:
        sizes: the number of ranks along each axis, by name.

    Raises:
        SpmdError: an axis that an outer block binds with another size.

    >>> with axis_environment({"data": 2, "model": 4}):
    ...     axis_size(("data", "model"))
    8
    """
    outer = _axis_sizes.get() or {}
    for name, size in sizes.items():
        if outer.get(name, size) != size:
            raise SpmdError(f"Axis {name!r} has size {outer[name]} here and cannot be bound again with size {size}.")
    token = _axis_sizes.set({**outer, **sizes})
    try:
        yield
    finally:
        _axis_sizes.reset(token)


def resolve_axes(axis_name: str | Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The axes of an `axis_name` argument and their sizes; SpmdError if one is not bound or is named twice."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    known = _axis_sizes.get()
    if known is None:
        raise SpmdError(
            f"No mesh axis is bound here (got axis_name={axis_name!r}). Use collectives inside spmd.shard_map."
        )
    for axis in axes:
        if axis not in known:
            raise SpmdError(
                f"Unknown mesh axis {axis!r} in axis_name={axis_name!r}: inside which axes are "
                f"{', '.join(map(repr, known))}."
            )
        if axes.count(axis) > 1:
            raise SpmdError(f"Mesh axis {axis!r} is named twice in axis_name={axis_name!r}.")
    return axes, tuple(known[axis] for axis in axes)


def axis_size(axis_name: str | Sequence[str]) -> int:
    """The number of ranks along a mesh axis, or along several taken together; `jax.lax.axis_size`.

    Raises:
        SpmdError: an axis that is not bound, or is named twice.

    >>> with axis_environment({"data": 2}):
    ...     axis_size("data")
    2
    """
    return math.prod(resolve_axes(axis_name)[1])
