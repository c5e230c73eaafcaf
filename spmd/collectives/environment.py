"""The mesh axes, with their sizes, that per-rank code may name while it is traced, and the types of its values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TypeAlias

import torch

from spmd.collectives.axis_types import AxisType
from spmd.errors import SpmdError
from spmd.job.user_code import user_line

TypesOf: TypeAlias = Callable[[torch.Tensor], Mapping[str, AxisType]]
"""The types of a per-rank value along mesh axes; along those that are left out it is invariant."""

_axis_sizes: ContextVar[Mapping[str, int] | None] = ContextVar("spmd_axis_sizes", default=None)
_types_of: ContextVar[TypesOf | None] = ContextVar("spmd_types_of", default=None)
_in_backward: ContextVar[tuple[Mapping[str, int], TypesOf] | None] = ContextVar("spmd_in_backward", default=None)
_backward_of: ContextVar[tuple[str, Callable[[torch.Tensor], bool]] | None] = ContextVar(
    "spmd_backward_of", default=None
)


@contextlib.contextmanager
def axis_environment(sizes: Mapping[str, int], types_of: TypesOf | None = None) -> Iterator[None]:
    """Bind mesh axes for the collectives inside the `with` block; the axes of an outer block stay bound.

    Args:
        sizes: the number of ranks along each axis, by name.
        types_of: returns the types of a value; without it types are not known, and no collective casts its operand.

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
    with _bound({**outer, **sizes}, types_of):
        yield


def captured_environment() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function whose contexts bind the axes that are bound here, and no others."""
    sizes, types_of = bound_axes(), _types_of.get()
    return lambda: _bound(sizes, types_of)


@contextlib.contextmanager
def _bound(sizes: Mapping[str, int], types_of: TypesOf | None) -> Iterator[None]:
    tokens = _axis_sizes.set(sizes), _types_of.set(types_of)
    try:
        yield
    finally:
        _axis_sizes.reset(tokens[0])
        _types_of.reset(tokens[1])


@contextlib.contextmanager
def backward_environment(sizes: Mapping[str, int], types_of: TypesOf) -> Iterator[None]:
    """Let collectives name axes that are not bound in the `with` block, a backward pass.

    Functions of a `shard_map` body run in it, when the body has ended: `torch.autograd.Function.backward`, and what
    `torch.utils.checkpoint` computes again. They run among functions from outside, so the axes are not bound.
    """
    token = _in_backward.set((sizes, types_of))
    try:
        yield
    finally:
        _in_backward.reset(token)


@contextlib.contextmanager
def backward_of(function: str, is_constant: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Say that the `with` block is the backward pass of a `torch.autograd.Function`, and which values are constants."""
    token = _backward_of.set((function, is_constant))
    try:
        yield
    finally:
        _backward_of.reset(token)


def summing_backward(x: torch.Tensor) -> str | None:
    """The name of the `torch.autograd.Function` whose backward pass computes with `x`; None if `x` is a constant."""
    found = _backward_of.get()
    return None if found is None or found[1](x) else found[0]


def bound_axes() -> Mapping[str, int]:
    """The mesh axes that are bound here, and their sizes."""
    return _axis_sizes.get() or {}


def axis_type(x: torch.Tensor, axis: str) -> AxisType | None:
    """The type of a per-rank value along a mesh axis; None where types are not known."""
    types_of, later = _types_of.get(), _in_backward.get()
    if types_of is None and later is not None:
        types_of = later[1]
    return None if types_of is None else types_of(x).get(axis, AxisType.INVARIANT)


def resolve_axes(axis_name: str | Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The axes of an `axis_name` argument and their sizes; SpmdError if one is not bound or is named twice."""
    if not isinstance(axis_name, (str, Sequence)):
        raise SpmdError(
            f"axis_name must be a mesh axis or a tuple of them (got {axis_name!r}): the first one is major."
        )
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    known, later = _axis_sizes.get(), _in_backward.get()
    if later is not None:
        known = {**later[0], **(known or {})}
    if known is None:
        raise SpmdError(
            f"No mesh axis is bound at {user_line()} (got axis_name={axis_name!r}). Use collectives inside "
            "spmd.shard_map."
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
