"""Transport dtypes: each dtype is sent as one that gloo and NCCL support and reduce with torch's results."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

_CARRIED = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip
"""The dtypes that both backends support."""

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""The dtype in which to reduce one that the backends lack; casting a sum back wraps around as the narrow sum does."""


@attrs.frozen(eq=False)
class TransportDtype:
    """A way to send a flat tensor.

    Args:
        encode: converts a flat contiguous tensor to the flat tensor that is sent.
        decode: converts a received tensor back to the dtype.
        factor: how many elements are sent for each element of the tensor.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    factor: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether tensors are sent as they are."""
        return self is _PLAIN


def moved(dtype: torch.dtype) -> TransportDtype:
    """The transport dtype of collectives that only move elements: bytes if the backends lack the dtype."""
    if dtype in _CARRIED:
        return _PLAIN
    return TransportDtype(lambda x: viewed(x, torch.uint8), lambda x: x.view(dtype), dtype.itemsize)


def viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A flat contiguous tensor as elements of a narrower dtype; that of one element may have any stride."""
    return x.as_strided(x.shape, (1,)).view(dtype)


def reduced(dtype: torch.dtype, op: str) -> TransportDtype:
    """The transport dtype of collectives that reduce by `op`: `"sum"`, `"max"` or `"min"`.

    In torch, max and min of a NaN are NaN. Neither backend guarantees that (with gloo the result depends on the rank),
    so floats are reduced as integers in the same order, with NaN as the largest (max) or smallest (min) integer.
    """
    if dtype.is_complex:
        real = dtype.to_real()
        return TransportDtype(lambda x: viewed(x, real), lambda x: x.view(dtype), 2)
    if dtype.is_floating_point and op in ("max", "min"):
        return _ordered(dtype, op)
    wider = _WIDER.get(dtype)
    if wider is None:
        return _PLAIN
    return TransportDtype(lambda x: x.to(wider), lambda x: x.to(dtype))


def _ordered(dtype: torch.dtype, op: str) -> TransportDtype:
    """Floats as integers in the same order: their bits, inverted below the sign bit where that is set."""
    floats, integers = (torch.float64, torch.int64) if dtype == torch.float64 else (torch.float32, torch.int32)
    limits = torch.iinfo(integers)
    nan = limits.max if op == "max" else limits.min

    def flip(bits: Tensor) -> Tensor:
        return torch.where(bits < 0, bits ^ limits.max, bits)  # its own inverse

    def encode(x: Tensor) -> Tensor:
        wide = x.to(floats)
        return torch.where(wide.isnan(), nan, flip(wide.view(integers)))

    def decode(bits: Tensor) -> Tensor:
        return flip(bits).view(floats).to(dtype)

    return TransportDtype(encode, decode)


_PLAIN = TransportDtype(lambda x: x, lambda x: x)
