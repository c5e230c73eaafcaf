"""Small calls of operators on which no rule is checked: those without a rule, list operators and random operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proofs.rule_calls.draws import Calls, Draws, call, each

aten = torch.ops.aten
_draws = Draws(23)
f, b = _draws.f, _draws.b

_LSTM, _HIDDEN = 2, 4
"""The mode of `mkldnn_rnn_layer`, and the length of its states."""


def _single(*shape: int) -> Tensor:
    return f(*shape, dtype=torch.float32)


def _layer() -> tuple[Tensor, ...]:
    """Input, weights and states of an LSTM layer, for 5 time steps of 3 sequences."""
    gates = 4 * _HIDDEN
    weights = (_single(gates, _HIDDEN), _single(gates, _HIDDEN), _single(gates), _single(gates))
    return (_single(5, 3, _HIDDEN), *weights, _single(3, _HIDDEN), _single(3, _HIDDEN))


def _recurrent(backwards: bool) -> Calls:
    return [call(*_layer(), backwards, [], _LSTM, _HIDDEN, 1, True, False, False, True)]


def _recurrent_backward() -> Calls:
    given = _layer()
    results = aten.mkldnn_rnn_layer.default(*given, False, [], _LSTM, _HIDDEN, 1, True, False, False, True)
    gradients = [_single(*result.shape) for result in results[:3]]
    options: tuple[Any, ...] = (_LSTM, _HIDDEN, 1, True, True, False, [], False)
    return [call(*given, *results[:3], *gradients, False, *options, results[3])]


def _lists(count: int) -> list[list[Tensor]]:
    return [[f(4, 5), f(2, 3, 4)] for _ in range(count)]


UNRULED: dict[torch._ops.OpOverload, Calls] = {
    aten.mkldnn_rnn_layer.default: [*_recurrent(False), *_recurrent(True)],
    aten.mkldnn_rnn_layer_backward.default: _recurrent_backward(),
    aten.view.dtype: [call(f(3, 4, 6), torch.float32), call(_single(4, 6), torch.float64), call(f(4, 6), torch.int64)],
    aten.resize.default: [call(f(4, 3, 5), [6, 10])],
    aten._weight_norm_interface.default: [call(f(4, 5, 3), f(4, 1, 1), 0)],
    aten._weight_norm_interface_backward.default: [call(f(4, 5, 3), f(4, 5, 3), f(4, 1, 1), f(4, 1, 1), 0)],
    **each(
        (aten._foreach_add.List, aten._foreach_mul.List, aten._foreach_div.List, aten._foreach_maximum.List),
        lambda: [call(*_lists(2))],
    ),
    **each((aten._foreach_addcmul.Scalar, aten._foreach_addcdiv.Scalar), lambda: [call(*_lists(3))]),
    **each((aten._foreach_sqrt.default, aten._foreach_norm.Scalar), lambda: [call(*_lists(1))]),
    aten._foreach_lerp.Scalar: [call(*_lists(2), 0.3)],
    aten.native_dropout.default: [call(f(4, 5, 3), 0.5, True)],
    aten.multinomial.default: [call(f(4, 5).abs(), 3, True)],
    aten.bernoulli.default: [call(f(4, 5, 3).sigmoid())],
    aten.poisson.default: [call(f(4, 5, 3).abs())],
    aten.rrelu_with_noise_functional.default: [call(f(4, 5, 3), f(4, 5, 3), 0.1, 0.3, True)],
}
