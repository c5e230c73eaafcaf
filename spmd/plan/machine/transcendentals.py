"""How many evaluations of a transcendental function, such as `tanh`, operators make beside their memory traffic."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

aten = torch.ops.aten


def evaluations(op: Any, kwargs: Mapping[str, Any]) -> float:
    """Evaluations for each element of an operator's first result; 0 if they take no longer than its bytes.

    Args:
        op: the operator.
        kwargs: its arguments by keyword.
    """
    return 1.0 if kwargs.get("approximate") == "tanh" else _EVALUATIONS.get(op, 0.0)


_EVALUATIONS: Mapping[Any, float] = MappingProxyType(
    {
        aten.gelu.default: 0.25,
        aten.gelu_backward.default: 0.5,
        aten._softmax.default: 0.25,
        aten._log_softmax.default: 0.25,
        aten.softplus.default: 0.75,
        aten.log_sigmoid_forward.default: 0.75,
        aten.elu.default: 0.5,
        aten.mish.default: 2.5,
        aten.log1p.default: 0.5,
        aten.expm1.default: 0.5,
        aten.sinh.default: 0.75,
        aten.atan2.default: 0.75,
        aten.pow.Tensor_Tensor: 1.5,
        aten.lgamma.default: 3.5,
        aten.digamma.default: 6.5,
        aten.acosh.default: 9.5,
    }
)
"""What operators take beside their bytes, in quarters of what gelu by `tanh` does, forward or backward.

Measured on 2^18 elements in float32, on a processor with AVX-512. `exp`, `tanh`, `erf`, `log`, `sin`, `cos` and roots
take no longer than their bytes there.
"""
