"""A kernel's expected results, up to the order of summation."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

_ULPS = 100
"""How far results of equal operands may differ, in units of the effect of rounding the operands."""


@attrs.frozen(eq=False)
class Expected:
    """An expected result.

    Args:
        value: the result.
        error: how much another order of summation may change each element; None if the values are arbitrary.
    """

    value: Tensor
    error: Tensor | None

    @classmethod
    def of(cls, value: Tensor, again: Tensor, moved: Tensor) -> Expected:
        """The expected result, from the results of two equal calls and of one on `perturbed` operands.

        If the two equal calls differ, the values are arbitrary.
        """
        if not _has_fractions(value):
            return cls(value, torch.zeros(()) if torch.equal(value, again) else None)
        rounding = torch.finfo(value.dtype).eps if value.dtype.itemsize > 1 else 0.0
        numbers, again, moved = _widened(value), _widened(again), _widened(moved)
        if not bool(_is_close(again, numbers, torch.zeros(())).all()):
            return cls(value, None)
        size, change = (x.abs().nan_to_num(0.0, 0.0, 0.0) for x in (numbers, moved - numbers))
        if not value.numel():
            return cls(value, size)
        return cls(value, _ULPS * (rounding * (size + size.mean()) + change + change.mean()))

    def difference(self, actual: Tensor) -> str | None:
        """Why `actual` is not this result; None if it is."""
        value = self.value
        if (actual.shape, actual.dtype) != (value.shape, value.dtype):
            return f"{_text(actual)}, expected {_text(value)}"
        if self.error is None:
            return None
        if not _has_fractions(value):
            return None if torch.equal(actual, value) else "other values"
        return None if bool(_is_close(_widened(actual), _widened(value), self.error).all()) else "other values"


def perturbed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A float tensor with relative noise of the size of rounding; a copy of an 8-bit or integer tensor."""
    if not _has_fractions(tensor) or tensor.dtype.itemsize == 1:
        return tensor.clone()
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * torch.finfo(tensor.dtype).eps
    return (_widened(tensor) * (1 + noise)).to(tensor.dtype)


def _is_close(actual: Tensor, value: Tensor, error: Tensor) -> Tensor:
    return ((actual - value).abs() <= error) | (actual == value) | (actual.isnan() & value.isnan())


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
