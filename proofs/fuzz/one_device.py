"""Reference execution on one device: torch's operators, without known bugs of torch 2.13."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.rules.layouts import laid_out

aten = torch.ops.aten

_MISTAKEN = frozenset({
    aten.native_batch_norm_backward.default, aten.diagonal_scatter.default, aten.select_scatter.default,
    aten.slice_scatter.default,
})  # fmt: skip
"""Kernels that silently compute wrong values if an operand is not contiguous."""


class OneDevice(TorchDispatchMode):
    """Runs operators, and counts them.

    Kernels that compute wrong values from non-contiguous operands get contiguous ones. Zero tensors, which stand for
    tangents of constants, are replaced by dense ones, since some operators crash on them if called from Python.
    """

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        args, kwargs = tuple(_dense(arg) for arg in args), kwargs or {}
        result = func(*args, **kwargs)
        if func not in _MISTAKEN:
            return result
        args, kwargs = laid_out(func, args, kwargs)
        return optree.tree_map(_in_memory_of, result, func(*args, **kwargs))


def _in_memory_of(tensor: Any, value: Any) -> Any:
    """The value in the memory order of a tensor: later random operators depend on the order."""
    return torch.empty_like(tensor).copy_(value) if isinstance(tensor, torch.Tensor) else value


def _dense(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor) and arg._is_zerotensor():
        return torch.zeros(arg.shape, dtype=arg.dtype)
    return arg
