"""Small calls of layer norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from proofs.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(14)
f = _draws.f


def norm_backward(mask: Sequence[bool], weight: torch.Tensor | None, bias: torch.Tensor | None) -> Calls:
    x = f(4, 2, 5)
    _, mean, rstd = aten.native_layer_norm.default(x, [5], weight, bias, 1e-5)
    return [call(f(4, 2, 5), x, [5], mean, rstd, weight, bias, list(mask))]


NORMALIZATION = {
    aten.native_layer_norm.default: [
        call(f(4, 2, 5), [5], f(5), f(5), 1e-5),
        call(f(4, 2, 5), [2, 5], None, None, 1e-5),
        call(f(4, 2, 5), [5], None, f(5), 1e-5),
    ],
    aten.native_layer_norm_backward.default: [
        *norm_backward((True, True, True), f(5), f(5)),
        *norm_backward((True, False, False), None, None),
        *norm_backward((False, True, True), f(5), f(5)),
    ],
}
