"""Small calls of reductions, and of softmax."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(13)
f, i, b = _draws.f, _draws.i, _draws.b


def reduced() -> Calls:
    return [call(f(4, 5), [1]), call(f(4, 5, 3), [0, -1], True), call(f(4, 5), [0])]


def by_dim() -> Calls:
    return [call(f(4, 5), 1), call(f(4, 5), 0, True)]


REDUCTION = {
    aten.sum.default: [call(f(4, 5)), call(i(5, 4)), call(b(4)), call(f())],
    aten.sum.dim_IntList: [*reduced(), call(f(4, 5), []), call(f(4, 5), None), call(i(5, 4, 3), [0])],
    aten.mean.default: [call(f(4, 5))],
    aten.hash_tensor.default: [call(f(4, 5), [1]), call(f(4, 5))],
    aten.mean.dim: reduced(),
    aten.amax.default: [*reduced(), call(i(5, 4, 3), [0]), call(f(4, 5))],
    aten.amin.default: [*reduced(), call(i(5, 4, 3), [0])],
    aten.max.default: [call(f(4, 5)), call(i(5, 4))],
    aten.min.default: [call(f(4, 5))],
    aten.any.default: [call(b(4, 5)), call(torch.zeros(4, dtype=torch.bool))],
    aten.any.dim: [call(b(4, 5), 1)],
    aten.any.dims: [call(b(4, 5), [0, 1]), call(torch.zeros(4, 5, dtype=torch.bool), [0, 1])],
    aten.all.default: [call(b(4, 5)), call(torch.ones(4, dtype=torch.bool))],
    aten._is_all_true.default: [call(b(4, 5)), call(torch.ones(4, dtype=torch.bool))],
    aten._is_any_true.default: [call(b(4, 5)), call(torch.zeros(4, dtype=torch.bool))],
    aten.all.dim: [call(b(4, 5), 1)],
    aten.all.dims: [call(b(4, 5), [0, 1]), call(torch.ones(4, 5, dtype=torch.bool), [0, 1])],
    aten.median.default: [call(f(4, 5))],
    aten.nanmedian.default: [call(f(4, 5))],
    aten.prod.default: [call(f(4, 5))],
    aten.prod.dim_int: by_dim(),
    aten.var.correction: [call(f(4, 5), [1], correction=1), call(f(4, 5), None, correction=0, keepdim=True)],
    aten.std.correction: [call(f(4, 5), [1], correction=1)],
    aten.var_mean.correction: [call(f(4, 5), [0], correction=1, keepdim=True)],
    aten.logsumexp.default: [
        call(f(4, 5), [1]),
        call(f(4, 5), [0, 1], True),
        call(torch.full((4, 2), -torch.inf, dtype=torch.float64), [0]),
    ],
    aten.linalg_vector_norm.default: [
        call(f(4, 5), p, dim) for p in (2, 1, 0, torch.inf, -torch.inf, 3) for dim in (None, [0])
    ],
    aten._softmax.default: [call(f(4, 5), 1, False), call(f(4, 5), 0, False)],
    aten._log_softmax.default: [call(f(4, 5), 1, False), call(f(3, 4, 5), -2, False)],
    aten._softmax_backward_data.default: [call(f(4, 5), f(4, 5).softmax(1), 1, torch.float64)],
    aten._log_softmax_backward_data.default: [call(f(4, 5), f(4, 5).log_softmax(1), 1, torch.float64)],
}
