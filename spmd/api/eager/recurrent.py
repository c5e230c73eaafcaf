"""OneDNN's operator for a layer of an LSTM on DTensors, by steps.

Each step is of operators that are planned once for all steps. The backward pass computes the forward pass again: what
oneDNN's saves for it has a size that only its kernel knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from spmd.tracing.recurrent import CELLS, RecurrentLayers, run_direction


def lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: bool,
    batch_sizes: Sequence[int], mode: int, hidden: int, count: int, bias: bool, *_: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten.mkldnn_rnn_layer`: the output [time, batch, features], the final states, and an empty workspace."""
    weights = (w_ih, w_hh, b_ih, b_hh) if bias else (w_ih, w_hh)
    layers = RecurrentLayers(CELLS["lstm"], weights, bias, 1, 0.0, False)
    output, states = run_direction(layers, x, (h, c), weights, reverse=reverse)
    return output, *states, torch.zeros_like(h[:0], dtype=torch.uint8)


def lstm_layer_backward(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, output: Tensor,
    last_h: Tensor, last_c: Tensor, *more: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`aten.mkldnn_rnn_layer_backward`: the gradients of the input, the weights and the initial states."""
    *cotangents, reverse, mode, hidden, count, bias, _, _, batch_sizes, _, _ = more
    with enable_reentrant_dispatch(), torch.enable_grad():
        leaves: list[Any] = [tensor.detach().requires_grad_() for tensor in (x, w_ih, w_hh, b_ih, b_hh, h, c)]
        results = lstm_layer(*leaves, reverse, batch_sizes, mode, hidden, count, bias)
        ends = [(end, given) for end, given in zip(results, cotangents, strict=False) if given is not None]
        outputs, given = zip(*ends, strict=True)
        return torch.autograd.grad(outputs, leaves, given, allow_unused=True)
