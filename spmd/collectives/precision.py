"""The dtype in which values are summed over ranks, where it is not their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

_reduce_dtype: ContextVar[torch.dtype | None] = ContextVar("spmd_reduce_dtype", default=None)


def summed_in(dtype: torch.dtype, op: str, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which values are reduced: `reduce_dtype` for sums of a floating dtype with fewer bits, else theirs.

    >>> summed_in(torch.bfloat16, "sum", torch.float32), summed_in(torch.float64, "sum", torch.float32)
    (torch.float32, torch.float64)
    """
    if reduce_dtype is None or op != "sum" or not dtype.is_floating_point or dtype.itemsize >= reduce_dtype.itemsize:
        return dtype
    return reduce_dtype


@contextlib.contextmanager
def reducing_in(dtype: torch.dtype | None) -> Iterator[None]:
    """A context in which `psum` and `psum_scatter` sum in a dtype, as by `summed_in`."""
    token = _reduce_dtype.set(dtype)
    try:
        yield
    finally:
        _reduce_dtype.reset(token)


def reduce_wide(x: torch.Tensor, op: str, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`reduce(x)` in the dtype of the context `reducing_in`, and the result in that of `x`."""
    wide = summed_in(x.dtype, op, _reduce_dtype.get())
    return reduce(x) if wide == x.dtype else reduce(x.to(wide)).to(x.dtype)
