"""Softmax and log_softmax, also over a sharded dim: two all-reduces of one value per row forward, one backward."""

from __future__ import annotations

from torch import Tensor

from spmd.collectives import pmax, psum
from spmd.ir.call import Call
from spmd.rules.builders import along
from spmd.rules.ops.merges import row_max, widen
from spmd.rules.partial import linear
from spmd.rules.rule import Axes, table


def _shifted(axes: Axes, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`x` minus its maximum over `dim` on all ranks, and the sum of the exponentials of the difference."""
    x = widen(x)
    shifted = x - pmax(row_max(x, (dim % x.ndim,)), axes)
    return shifted, psum(shifted.exp().sum(dim, keepdim=True), axes)


def _softmax(axes: Axes, call: Call, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted, total = _shifted(axes, x, dim)
    return (shifted.exp() / total).to(call.results[0].dtype)


def _log_softmax(axes: Axes, call: Call, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted, total = _shifted(axes, x, dim)
    return (shifted - total.log()).to(call.results[0].dtype)


def _softmax_backward(axes: Axes, call: Call, grad: Tensor, output: Tensor, dim: int, _: object) -> Tensor:
    weighted = widen(grad) * widen(output)
    return (weighted - widen(output) * psum(weighted.sum(dim, keepdim=True), axes)).to(call.results[0].dtype)


def _log_softmax_backward(axes: Axes, call: Call, grad: Tensor, output: Tensor, dim: int, _: object) -> Tensor:
    total = psum(widen(grad).sum(dim, keepdim=True), axes)
    return (widen(grad) - widen(output).exp() * total).to(call.results[0].dtype)


SOFTMAX = table({
    "_softmax": along(body=_softmax),
    "_log_softmax": along(body=_log_softmax),
    "_softmax_backward_data": along(linear("grad_output"), body=_softmax_backward),
    "_log_softmax_backward_data": along(linear("grad_output"), body=_log_softmax_backward),
})  # fmt: skip
