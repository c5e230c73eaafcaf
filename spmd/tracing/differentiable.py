"""Replacements for torch functions that do not support all `torch.func` transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.nn.attention import SDPBackend, sdpa_kernel


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot`; torch's reads the values of its argument under grad and jvp."""
    if num_classes < 0:
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention by fused kernels outside of transforms and under one grad only.

    The fused kernels have no forward mode, no second derivative and no vmap rule.
    """
    fused = [level.key() for level in get_interpreter_stack() or ()] in ([], [TransformType.Grad])
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


DIFFERENTIABLE: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {F.one_hot: _one_hot, F.scaled_dot_product_attention: _attention}
)
"""The replacement for each torch function."""
