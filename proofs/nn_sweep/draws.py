"""Inputs of calls that are made by hand."""

from __future__ import annotations

import torch


def real(*shape: int) -> torch.Tensor:
    """Normally distributed doubles."""
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    """Doubles in (0.1, 0.9)."""
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64)


def below(high: int, *shape: int) -> torch.Tensor:
    """Indices below `high`."""
    return torch.randint(high, shape)


def signs(*shape: int) -> torch.Tensor:
    """1 and -1, as doubles."""
    return torch.randint(2, shape).double() * 2 - 1
