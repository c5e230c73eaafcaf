"""Small calls of lookups in a table."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Draws, call

aten = torch.ops.aten
_draws = Draws(16)
f, i = _draws.f, _draws.i

EMBEDDING = {
    aten.embedding.default: [call(f(5, 3), i(5, 4, 2)), call(f(4, 3), i(4, 7), 1), call(f(4, 3), i(4))],
    aten.embedding_dense_backward.default: [
        call(f(4, 2, 3), i(5, 4, 2), 5, -1, False),
        call(f(7, 3), torch.tensor([0, 1, 1, 2, 3, 3, 3]), 4, 1, False),
        call(f(7, 3), torch.tensor([0, 1, 1, 2, 3, 3, 3]), 4, -1, True),
    ],
}
