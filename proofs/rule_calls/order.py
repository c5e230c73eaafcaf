"""Small calls of the operators that scan, search and sort."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Calls, Draws, call
from spmd.ir.canonical_scans import ADD_AT_EXTREMES, REVERSED

aten = torch.ops.aten
_draws = Draws(2)
f, i, b = _draws.f, _draws.i, _draws.b
nan, inf = torch.nan, torch.inf

_LINES = torch.tensor([[1.0, nan, 3.0, nan, inf], [2.0, 2.0, -inf, 2.0, 0.0], [-inf] * 5, [inf] * 5])


def scanned() -> Calls:
    return [call(f(4, 5), 1), call(f(5), 0), call(f(1, 3, 2), -2), call(f(3, 2).float(), 0), call(f(), 0)]


def extreme() -> Calls:
    return [call(_LINES, 1), call(_LINES, 0), call(i(7, 2), 0), call(b(5), 0)]


def searched() -> Calls:
    return [
        call(f(4, 5), 1),
        call(f(4, 5), 0, True),
        call(i(3, 7, 2), 0),
        call(_LINES, 1),
        call(_LINES, 0),
        call(_LINES[:, 1], -1, True),
        call(f(1, 3), 0),
    ]


_flat = [call(f(4, 5)), call(_LINES), call(i(2, 3, 2, 5)), call(f(3, 2), None, True), call(f())]

ORDER = {
    aten.cumsum.default: [*scanned(), call(i(9, 5), 0), call(b(5), 0), call(f(5), 0, dtype=torch.float32)],
    aten.cumprod.default: [*scanned(), call(i(4, 5), 0), call(f(5, 2), 0, dtype=torch.float32)],
    aten.logcumsumexp.default: [*scanned(), call(torch.full((5, 2), -inf), 0)],
    aten.cummax.default: [*scanned(), *extreme()],
    aten.cummin.default: [*scanned(), *extreme()],
    REVERSED[aten.cumsum.default]: [*scanned(), call(i(9, 5), 0), call(f(5), 0, dtype=torch.float32)],
    REVERSED[aten.cumprod.default]: [*scanned(), call(i(4, 5), 0)],
    REVERSED[aten.logcumsumexp.default]: scanned(),
    ADD_AT_EXTREMES: [call(f(*x.shape), dim, x.cummax(dim).indices) for (x, dim), _ in [*scanned(), *extreme()]],
    aten.max.dim: [*searched(), call(b(5), 0)],
    aten.min.dim: [*searched(), call(b(5), 0)],
    aten.argmax.default: [*searched(), *_flat],
    aten.argmin.default: [*searched(), *_flat],
}
