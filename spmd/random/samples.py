"""Draws from standard distributions: bits and floats, with `jax.random`'s names and arguments."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spmd.errors import SpmdError
from spmd.job.user_code import user_line
from spmd.random.generators.draw import DRAW
from spmd.random.keys import Key, broadcasts, shape_of, used

Shape: TypeAlias = int | tuple[int, ...] | list[int]
"""The shape of a result; an integer is that of one dim."""

_SIGNED = {torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def bits(key: Key, shape: Shape = (), dtype: torch.dtype = torch.uint32) -> Tensor:
    """Uniform random integers of all bits of an unsigned dtype; `jax.random.bits`.

    Args:
        key: a single key.
        shape: the shape of the result.
        dtype: `torch.uint8`, `torch.uint16`, `torch.uint32` or `torch.uint64`.

    Raises:
        SpmdError: no single key, no shape, or another dtype.

    >>> import spmd
    >>> bits(spmd.random.key(0), (2,)).to(torch.int64)
    tensor([1713891541, 3781805453])
    """
    if dtype not in _SIGNED:
        raise SpmdError(
            f"dtype of spmd.random.bits at {user_line()} must be one of {', '.join(map(str, _SIGNED))} (got {dtype})."
        )
    return DRAW(used(key, "bits"), shape_of(shape, "bits"), "bits", _SIGNED[dtype], key.impl).view(dtype)


def uniform(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
) -> Tensor:
    """Uniform random floats in [minval, maxval); `jax.random.uniform`.

    Args:
        key: a single key.
        shape: the shape of the result.
        dtype: a floating dtype, by default `torch.get_default_dtype()`.
        minval, maxval: the ends, numbers or tensors that broadcast to `shape`; the result is differentiable in them.

    Raises:
        SpmdError: no single key, no shape, another dtype, or ends that do not broadcast.

    >>> import spmd
    >>> uniform(spmd.random.key(0), (3,))
    tensor([0.3990, 0.8805, 0.7357])
    """
    found = _standard("uniform", key, shape, dtype)
    if not isinstance(minval, Tensor) and not isinstance(maxval, Tensor) and minval == 0 and maxval == 1:
        return found
    low, high = (_parameter(end, found, "uniform", name) for end, name in ((minval, "minval"), (maxval, "maxval")))
    return torch.maximum(low, found * (high - low) + low)


def normal(key: Key, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal random floats; `jax.random.normal`.

    Args:
        key: a single key.
        shape: the shape of the result.
        dtype: a floating dtype, by default `torch.get_default_dtype()`. Those of 16 bits are rounded from float32.

    Raises:
        SpmdError: no single key, no shape, or another dtype.

    >>> import spmd
    >>> normal(spmd.random.key(0), (3,))
    tensor([-0.2558,  1.1776,  0.6302])
    """
    return _standard("normal", key, shape, dtype)


def gumbel(key: Key, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Random floats of the standard Gumbel distribution; `jax.random.gumbel`. Arguments and errors as of `normal`.

    >>> import spmd
    >>> gumbel(spmd.random.key(0), (3,))
    tensor([0.0848, 2.0617, 1.1812])
    """
    return _standard("gumbel", key, shape, dtype)


def exponential(key: Key, shape: Shape = (), dtype: torch.dtype | None = None) -> Tensor:
    """Random floats of the standard exponential distribution; `jax.random.exponential`. As `normal` otherwise.

    >>> import spmd
    >>> exponential(spmd.random.key(0), (3,))
    tensor([0.5092, 2.1246, 1.3307])
    """
    return _standard("exponential", key, shape, dtype)


def truncated_normal(
    key: Key,
    lower: float | Tensor,
    upper: float | Tensor,
    shape: Shape | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Normal random floats between two ends; `jax.random.truncated_normal`.

    Args:
        key: a single key.
        lower, upper: the ends, numbers or tensors; the result is differentiable in them.
        shape: the shape of the result; by default that to which the ends broadcast.
        dtype: a floating dtype, by default `torch.get_default_dtype()`.

    Raises:
        SpmdError: no single key, no shape, another dtype, or ends that do not broadcast.

    >>> import spmd
    >>> truncated_normal(spmd.random.key(0), -1.0, 1.0, (3,))
    tensor([-0.1736,  0.7056,  0.4150])
    """
    tensors = [end for end in (lower, upper) if isinstance(end, Tensor)]
    given = tuple(torch.broadcast_tensors(*tensors)[0].shape) if tensors else ()
    fractions = _standard("uniform", key, given if shape is None else shape, dtype, by="truncated_normal")
    low, high = (
        _parameter(end, fractions, "truncated_normal", name) for end, name in ((lower, "lower"), (upper, "upper"))
    )
    root = math.sqrt(2)
    least, most = torch.erf(low / root), torch.erf(high / root)
    found = torch.erfinv(torch.maximum(least, fractions * (most - least) + least)) * root
    with torch.no_grad():
        inside = torch.nextafter(low, low.new_full((), torch.inf)), torch.nextafter(high, high.new_full((), -torch.inf))
    return torch.minimum(torch.maximum(found, inside[0]), inside[1])


def bernoulli(key: Key, p: float | Tensor = 0.5, shape: Shape | None = None) -> Tensor:
    """Random booleans that are true with probability `p`; `jax.random.bernoulli`.

    Args:
        key: a single key.
        p: a probability, or a floating tensor of them.
        shape: the shape of the result, to which `p` broadcasts; by default that of `p`.

    Raises:
        SpmdError: no single key, no shape, or probabilities that are none or do not broadcast.

    >>> import spmd
    >>> bernoulli(spmd.random.key(0), 0.5, (3,))
    tensor([ True, False, False])
    """
    if not isinstance(p, Tensor) and not 0 <= p <= 1:
        raise SpmdError(f"p of spmd.random.bernoulli at {user_line()} must be a probability (got {p}).")
    floating = isinstance(p, Tensor) and p.dtype.is_floating_point
    size: Any = shape if shape is not None else tuple(p.shape) if isinstance(p, Tensor) else ()
    drawn = _standard("uniform", key, size, p.dtype if isinstance(p, Tensor) and floating else None, by="bernoulli")
    return drawn < _parameter(p, drawn, "bernoulli", "p")


def _standard(kind: str, key: Key, shape: Shape, dtype: torch.dtype | None, by: str | None = None) -> Tensor:
    """Samples of a standard distribution, for the function of its name or of the name `by`."""
    name, dtype = by or kind, torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise SpmdError(
            f"dtype of spmd.random.{name} at {user_line()} must be floating, of 16 bits or more (got {dtype})."
        )
    return DRAW(used(key, name), shape_of(shape, name), kind, dtype, key.impl)  # type: ignore[no-any-return]


def _parameter(value: float | Tensor, drawn: Tensor, name: str, argument: str) -> Tensor:
    """An argument in the dtype of what is drawn; SpmdError if it does not broadcast to its shape."""
    found = torch.as_tensor(value, dtype=drawn.dtype, device=drawn.device)
    if not broadcasts(found, drawn.shape):
        raise SpmdError(
            f"{argument} {tuple(found.shape)} of spmd.random.{name} at {user_line()} does not broadcast to the shape "
            f"{tuple(drawn.shape)} of the result."
        )
    return found
