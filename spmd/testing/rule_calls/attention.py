"""Small calls of fused attention."""

from __future__ import annotations

import torch

from spmd.testing.rule_calls.draws import Calls, Draws, call

aten = torch.ops.aten
_draws = Draws(15)
f = _draws.f

_flash = aten._scaled_dot_product_flash_attention_for_cpu.default


def attention_backward(causal: bool, mask: torch.Tensor | None) -> Calls:
    q, k, v = f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8)
    out, logsumexp = _flash(q, k, v, 0.0, causal, attn_mask=mask)
    return [call(f(2, 3, 4, 8), q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask)]


ATTENTION = {
    _flash: [
        call(f(2, 3, 4, 8), f(2, 3, 4, 8), f(2, 3, 4, 8), 0.0, True),
        call(f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8), scale=0.3),
        call(f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8), attn_mask=f(4, 6)),
        call(f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8), attn_mask=f(2, 1, 4, 6)),
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: [
        *attention_backward(True, None),
        *attention_backward(False, None),
        *attention_backward(False, f(4, 6)),
    ],
}
