"""Dropout by a key."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from spmd.core.mesh import Mesh
from spmd.errors import SpmdError
from spmd.job.user_code import user_line
from spmd.random.generators.draw import DRAW
from spmd.random.keys import Key, single, used
from spmd.tracing.active_transforms import unwrapped

_LEVELS = 2**16
"""A decision takes 16 random bits, of which a counter of `philox4x32` has eight times as many."""


def dropout(key: Key, x: Tensor, p: float = 0.5) -> Tensor:
    """Set random elements to zero and scale the others, as `torch.nn.functional.dropout` does in training.

    The probability is rounded to a multiple of 2^-16, and the scale is that of the rounded one, so that the mean stays.
    In a backward pass that computes it again (`torch.utils.checkpoint`), the same elements are zero.

    Args:
        key: a single key.
        x: floats; the result is differentiable in them.
        p: the probability that an element is zero.

    Raises:
        SpmdError: no single key, no floats, or no probability.

    >>> import spmd
    >>> dropout(spmd.random.key(0), torch.ones(6), 0.5)
    tensor([0., 2., 0., 0., 0., 0.])
    """
    single(key, "dropout")
    if not isinstance(x, Tensor) or not (x.dtype.is_floating_point or x.dtype.is_complex):
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise SpmdError(f"x of spmd.random.dropout at {user_line()} must be a tensor of floats (got {got}).")
    if isinstance(p, bool) or not isinstance(p, (int, float, torch.SymFloat)) or not 0 <= p <= 1:
        raise SpmdError(f"p of spmd.random.dropout at {user_line()} must be a probability (got {p!r:.60}).")
    data, level = used(key, "dropout"), round(float(p) * _LEVELS)
    from spmd.api.values.dtensor import DTensor  # below it, tracing imports the generators of this package

    inner = unwrapped(x)
    drop = _on_shards(inner.mesh) if isinstance(inner, DTensor) else _dropped
    return drop(data, x, level, key.impl)


def _dropped(data: Tensor, x: Tensor, level: int, impl: str) -> Tensor:
    """`x` with elements set to zero in `level` of `_LEVELS` cases."""
    if level in (0, _LEVELS):
        return x if level == 0 else torch.zeros_like(x)
    mask = DRAW(data.to(x.device), x.shape, "mask", torch.int8, impl, None, None, level - _LEVELS // 2)
    return (x * mask).mul_(_LEVELS / (_LEVELS - level))


@functools.cache
def _on_shards(mesh: Mesh) -> Callable[[Tensor, Tensor, int, str], Tensor]:
    """`_dropped` of a DTensor: one program, so that no rank draws for other shards than its own."""
    from spmd.api.jit import jit  # as in `dropout`

    return jit(_dropped, mesh=mesh, static_argnums=(2, 3))
