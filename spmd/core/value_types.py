"""Types whose values are compared by value, of Python and of torch."""

from __future__ import annotations

import enum

import torch

NUMBERS = (bool, int, float, complex)
VALUES = (*NUMBERS, str, bytes)
"""The types of Python values."""

EXACT = (bool, int, str, bytes, type(None))
"""The types whose values are their own keys, beside the type."""

TORCH_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)

PLAIN = (*VALUES, type(None), *TORCH_VALUES)
"""The types of plain values of Python and torch."""

CONSTANTS = (*PLAIN, enum.Enum, type)
"""The types of values that are no tensors, and that are the same if they are equal."""


def is_continuous(dtype: torch.dtype) -> bool:
    """Test for a floating-point or complex dtype: its values may have derivatives."""
    return dtype.is_floating_point or dtype.is_complex


def is_integer(dtype: torch.dtype) -> bool:
    """Test for a dtype of integers, of which booleans are none."""
    return not (is_continuous(dtype) or dtype == torch.bool)
