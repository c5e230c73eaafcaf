"""Softmax and log_softmax, also over a sharded dim: two all-reduces of a value per row forward, one backward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.collectives import pmax, psum
from spmd.rules.builders import along
from spmd.rules.partial import linear
from spmd.rules.reductions import row_max
from spmd.rules.rule import Call, Rule

aten = torch.ops.aten


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the precision in which torch's kernels accumulate."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _shifted(axes: tuple[str, ...], x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` less its row's maximum, and the sum of the exponentials of that."""
    x = _wide(x)
    shifted = x - pmax(row_max(x, (dim % x.ndim,)), axes)
    return shifted, psum(shifted.exp().sum(dim, keepdim=True), axes)


def _softmax(axes: tuple[str, ...], call: Call, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted, total = _shifted(axes, x, dim)
    return (shifted.exp() / total).to(call.results[0].dtype)


def _log_softmax(axes: tuple[str, ...], call: Call, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted, total = _shifted(axes, x, dim)
    return (shifted - total.log()).to(call.results[0].dtype)


def _softmax_backward(
    axes: tuple[str, ...], call: Call, grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    weighted = _wide(grad) * _wide(output)
    return (weighted - _wide(output) * psum(weighted.sum(dim, keepdim=True), axes)).to(call.results[0].dtype)


def _log_softmax_backward(
    axes: tuple[str, ...], call: Call, grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    total = psum(_wide(grad).sum(dim, keepdim=True), axes)
    return (_wide(grad) - _wide(output).exp() * total).to(call.results[0].dtype)


SOFTMAX: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten._softmax.default: along(body=_softmax),
        aten._log_softmax.default: along(body=_log_softmax),
        aten._softmax_backward_data.default: along(linear("grad_output"), body=_softmax_backward),
        aten._log_softmax_backward_data.default: along(linear("grad_output"), body=_log_softmax_backward),
    }
)
