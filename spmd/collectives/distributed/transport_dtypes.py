"""How elements travel: every dtype as one that gloo and NCCL carry and reduce as torch does."""

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
"""The dtypes that both backends know."""

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""In which dtype to reduce those that the backends lack: casts to and fro wrap around as the sum itself would."""


@attrs.frozen(eq=False)
class TransportDtype:
    """A way to send a flat tensor.

    Args:
        encode: a flat contiguous tensor to the flat tensor that travels.
        decode: what came, back to the dtype.
        factor: how many elements travel for each.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    factor: int = 1


def moved(dtype: torch.dtype) -> TransportDtype:
    """The wire of collectives that only move elements: bytes where the backends lack the dtype."""
    if dtype in _CARRIED:
        return _PLAIN
    return TransportDtype(lambda x: x.view(torch.uint8), lambda x: x.view(dtype), dtype.itemsize)


def reduced(dtype: torch.dtype, op: str) -> TransportDtype:
    """The wire of collectives that reduce by `op`.

    Neither backend says that a NaN wins in max and min, as it does in torch (gloo: the result depends on the rank), so
    floats are compared as integers that are in the same order and have the NaNs at the winning end.
    """
    if dtype.is_complex:
        real = dtype.to_real()
        return TransportDtype(lambda x: x.view(real), lambda x: x.view(dtype), 2)
    if dtype.is_floating_point and op in ("max", "min"):
        return _ordered(dtype, op)
    wider = _WIDER.get(dtype)
    if wider is None:
        return _PLAIN
    return TransportDtype(lambda x: x.to(wider), lambda x: x.to(dtype))


def _ordered(dtype: torch.dtype, op: str) -> TransportDtype:
    """Floats as integers: the bits are in order where the sign is clear, and in reverse where it is set."""
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
