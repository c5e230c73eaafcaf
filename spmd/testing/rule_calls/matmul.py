"""Small calls of matrix products."""

from __future__ import annotations

import torch

from spmd.testing.rule_calls.draws import Draws, call

aten = torch.ops.aten
_draws = Draws(10)
f = _draws.f

MATMUL = {
    aten.mm.default: [call(f(4, 5), f(5, 3))],
    aten.bmm.default: [call(f(4, 2, 5), f(4, 5, 3))],
    aten.mv.default: [call(f(4, 5), f(5))],
    aten.dot.default: [call(f(5), f(5))],
    aten.addmm.default: [
        call(f(3), f(4, 5), f(5, 3)),
        call(f(4, 3), f(4, 5), f(5, 3), beta=2.0, alpha=-1.0),
        call(f(4, 1), f(4, 5), f(5, 3)),
    ],
    aten.baddbmm.default: [call(f(4, 2, 3), f(4, 2, 5), f(4, 5, 3)), call(f(1, 1, 3), f(4, 2, 5), f(4, 5, 3))],
    aten._trilinear.default: [
        call(f(4, 3), f(5, 3, 2), f(4, 2), [1, 3], [0], [1, 2], [2, 3]),
        call(f(4, 3), f(5, 3, 2), f(4, 2), [1, 3], [0], [1, 2], [3]),
        call(f(4, 5), f(4, 5), f(4, 5), [], [], [], [0]),
    ],
    aten.addbmm.default: [call(f(4, 3), f(5, 4, 2), f(5, 2, 3)), call(f(3), f(5, 4, 2), f(5, 2, 3), beta=2)],
    aten.addmv.default: [call(f(4), f(4, 5), f(5))],
}
