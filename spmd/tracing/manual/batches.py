"""Gradients under `torch.func.vmap` in a shard_map body: sums over ranks of what different samples have.

Where the samples of a rank are a batch, the ranks have nothing in common at one position of it. By its type, the
gradient of an invariant value is the sum over ranks, as in a loop over the samples. With one loss a rank that is what
data parallelism needs; for each element of a batch it adds unrelated samples, so the user says what is meant.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor, maybe_get_level
from torch._functorch.vmap import _flat_vmap

from spmd.collectives.axis_types import AxisType
from spmd.core.spec import TensorMeta
from spmd.errors import TraceError
from spmd.tracing.manual.axis_types import Types
from spmd.tracing.source import where

_I, _V = AxisType.INVARIANT, AxisType.VARYING
_VMAP = inspect.unwrap(_flat_vmap).__code__


def check_batches(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    axes: Sequence[str],
    types_of: Callable[[Tensor], Types],
) -> None:
    """Check gradients of values that are the same for a whole batch of which each rank has its own.

    Sums are meant of an output that is invariant, a loss of all ranks, and of an input that is batched, such as the
    parameters of an ensemble: on all ranks, an element of the batch is the same member.

    Args:
        outputs, inputs: what is differentiated, and with respect to what.
        gradients: those of the inputs.
        axes: the manual axes.
        types_of: returns the types of a tensor.

    Raises:
        TraceError: a gradient is a sum over ranks for each element of such a batch.
    """
    for axis in axes:
        kind = lambda x, axis=axis: types_of(x).get(axis, _I)  # noqa: E731
        differing = [x for x in outputs if _levels(x) and kind(x) is _V]
        for x, gradient in zip(inputs, gradients, strict=True):
            if not differing or gradient is None or kind(x) is not _I or kind(gradient) is not _I:
                continue
            levels = _levels(gradient) & {level for output in differing for level in _levels(output)} - _levels(x)
            if any(kind(sample) is _V for level in levels for sample in _batch(level)):
                raise TraceError(_message(x, axis))


def _message(x: Tensor, axis: str) -> str:
    return (
        f"The gradient of {TensorMeta.of(x)} at {where()} would be a sum over {axis!r} for each element of a batch. "
        f"The value is invariant along {axis!r} and the same for the whole batch of torch.func.vmap, and each rank has "
        "a batch of its own, so different samples of different ranks would be added. For the gradients of each rank's "
        f"samples call spmd.collectives.pcast(x, {axis!r}, to='varying') on the value before it is differentiated. If "
        f"they are meant to be added, differentiate their sum: spmd.collectives.psum(loss, {axis!r})."
    )


def _levels(x: Tensor) -> set[int]:
    """The levels of `vmap` at which a tensor is batched."""
    levels = set()
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            levels.add(maybe_get_level(x))
        x = get_unwrapped(x)
    return levels


def _batch(level: int) -> Iterator[Tensor]:
    """The arguments of the `vmap` that runs at a level which it maps over; torch keeps them on the stack only."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _VMAP and frame.f_locals.get("vmap_level") == level:
            held = zip(frame.f_locals["flat_in_dims"], frame.f_locals["flat_args"], strict=True)
            yield from (arg for dim, arg in held if dim is not None and isinstance(arg, torch.Tensor))
            return
        frame = frame.f_back
