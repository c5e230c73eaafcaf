"""Floats from integers, by JAX's formulas; torch's functions run on whole vectors.

A kernel computes the elements behind its last whole vector by other instructions. So that an element does not depend on
how many are computed with it, those that a function of rounded results is called on are padded to whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

_VECTOR = 64
"""A multiple of the elements that the loop of any kernel computes at once."""


def mantissa_bits(dtype: torch.dtype) -> int:
    """The number of bits behind the point of a floating dtype's numbers.

    >>> mantissa_bits(torch.float32), mantissa_bits(torch.bfloat16)
    (23, 7)
    """
    return -int(math.log2(torch.finfo(dtype).eps))


def fractions(patterns: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1): the first bits of integers, all that fit in the mantissa of the dtype, exactly."""
    count, width = mantissa_bits(dtype), 8 * patterns.itemsize
    found = (patterns >> (width - count)).bitwise_and_((1 << count) - 1)
    return found.to(dtype).mul_(2.0**-count)


def _normal(x: Tensor) -> Tensor:
    # Twice as many fractions as lie in [0, 1), less one; the least is the number behind -1.
    least = -1 + torch.finfo(x.dtype).eps / 2
    return x.mul_(2).add_(least).clamp_(min=least).erfinv_().mul_(math.sqrt(2))


def _gumbel(x: Tensor) -> Tensor:
    return x.clamp_(min=torch.finfo(x.dtype).tiny).log_().neg_().log_().neg_()


def _exponential(x: Tensor) -> Tensor:
    return x.neg_().log1p_().neg_()


_STANDARD: Mapping[str, Callable[[Tensor], Tensor]] = {
    "normal": _normal, "gumbel": _gumbel, "exponential": _exponential,
}  # fmt: skip
"""Samples of the standard distributions from fractions, which are overwritten."""

KINDS = ("bits", "mask", "uniform", *_STANDARD)
"""What an element of a draw may be: of a mask, one or zero."""


def width(kind: str, dtype: torch.dtype, mantissa_width: Callable[[torch.dtype], int]) -> int:
    """The bits of the integer that an element is made of; for floats, those that a generator takes."""
    if kind == "mask":
        return 16
    return 8 * dtype.itemsize if kind == "bits" else mantissa_width(computed_in(kind, dtype))


def computed_in(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which samples are computed, before they are rounded to `dtype`."""
    return torch.float32 if kind in _STANDARD and dtype.itemsize < 4 else dtype


def samples(kind: str, patterns: Tensor, dtype: torch.dtype, level: int) -> Tensor:
    """Samples from integers, which are overwritten, one each: floats in the dtype of `computed_in`."""
    if kind == "bits":
        return patterns
    if kind == "mask":
        return patterns.ge_(level)  # many times faster than to booleans
    found = fractions(patterns, computed_in(kind, dtype))
    if kind == "uniform":
        return found
    flat = found.view(-1)
    count = flat.numel()
    if count % _VECTOR:
        flat = torch.nn.functional.pad(flat, (0, -count % _VECTOR))
    return _STANDARD[kind](flat)[:count].view(found.shape)
