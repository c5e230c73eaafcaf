"""Changes the last digits of sums, which on several ranks are added in another order."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proofs.fuzz.overlap import check_overlap
from proofs.fuzz.tensors import NUDGE

_SUMS = frozenset(
    [
        "sum",
        "mean",
        "prod",
        "cumsum",
        "cumprod",
        "logsumexp",
        "logcumsumexp",
        "var",
        "var_mean",
        "std",
        "norm",
        "linalg_vector_norm",
        "trace",
        "dot",
        "vdot",
        "mv",
        "mm",
        "bmm",
        "addmm",
        "addmv",
        "addbmm",
        "baddbmm",
        "convolution",
        "native_layer_norm",
        "native_group_norm",
        "native_batch_norm",
        "_softmax",
        "_log_softmax",
        "index_add",
        "index_reduce",
        "scatter_add",
        "scatter_reduce",
        "avg_pool2d",
        "_adaptive_avg_pool2d",
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "binary_cross_entropy",
        "nll_loss_forward",
    ],
)


_CENTERED = frozenset({"var", "var_mean", "std", "native_layer_norm", "native_group_norm", "native_batch_norm"})
"""Operators that subtract a mean: of equal numbers they give zero, or what rounding leaves of it."""

_LEFT_OVER = 1e-9


class OtherRounding(TorchDispatchMode):
    """Changes the last digits of results of sums, to find programs whose results depend on rounding.

    Refuses writes that `check_overlap` refuses.

    Args:
        nudge: the relative change of each number, up and down in turn; zeros do not change, as a sum of zeros is zero
            in every order, but those of operators that subtract a mean do, and what is close to zero there becomes
            zero.
    """

    def __init__(self, nudge: float = NUDGE) -> None:
        super().__init__()
        self._nudge = nudge

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            check_overlap(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _SUMS or func._schema.is_mutable:
            return result
        return optree.tree_map(lambda leaf: self._moved(leaf, name in _CENTERED), result)  # type: ignore[arg-type]

    def _moved(self, value: Any, centered: bool) -> Any:
        if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
            return value
        signs = torch.ones(value.numel(), dtype=torch.float64)
        signs[1::2] = -1  # so that numbers which rounding alone tells apart, differ
        moved = value * (1 + self._nudge * signs.view(value.shape)).to(value.dtype)
        if not centered:
            return moved
        left_over = torch.where(value == 0, torch.full_like(value, self._nudge), torch.zeros_like(value))
        return torch.where(value.abs() < _LEFT_OVER, left_over, moved)
