"""What one device computes: torch's operators without mistakes of theirs (torch 2.13)."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.rules.layouts import PROBED, Need, lay_out

_MISTAKEN = frozenset(
    op for op in PROBED if "batch_norm" in op or op.startswith(("aten.slice_", "aten.select_", "aten.diagonal_"))
)
"""Kernels that compute other values, without an error, if an operand is not contiguous."""


class OneDevice(TorchDispatchMode):
    """Runs operators, and counts them.

    Kernels that mistake an operand in other memory get what they need. And called from Python, some operators crash on
    the zero tensors that stand for tangents of constants: they get tensors.
    """

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        args, kwargs = tuple(_dense(arg) for arg in args), kwargs or {}
        result = func(*args, **kwargs)
        if str(func) not in _MISTAKEN:
            return result
        args, kwargs = lay_out(func, args, kwargs, _laid_out)
        return optree.tree_map(_in_memory_of, result, func(*args, **kwargs))


def _laid_out(leaf: Any, needed: Need) -> Any:
    return needed.lay_out(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _in_memory_of(tensor: Any, value: Any) -> Any:
    """The value in the order of memory of a tensor, in which draws may follow."""
    return torch.empty_like(tensor).copy_(value) if isinstance(tensor, torch.Tensor) else value


def _dense(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor) and arg._is_zerotensor():
        return torch.zeros(arg.shape, dtype=arg.dtype)
    return arg
