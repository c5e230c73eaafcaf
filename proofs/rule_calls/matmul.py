"""Small calls of matrix products."""

from __future__ import annotations

from typing import Any

import torch

from proofs.rule_calls.draws import Draws, call

aten = torch.ops.aten
_draws = Draws(10)
f = _draws.f

_eight, _transposed = f(5, 16).to(torch.float8_e4m3fn), f(6, 16).to(torch.float8_e4m3fn).t()
_rows, _columns = f(5, 1).float().exp(), f(1, 6).float().exp()


def scaled(left: torch.Tensor, right: torch.Tensor, kind: int) -> tuple[Any, ...]:
    """The arguments of a product with lists of scales: `kind` 0 is one scale per tensor, 1 one scale per row."""
    return _eight, _transposed, [left], [kind], [0], [right], [kind], [0]


def grouped(left: tuple[int, ...], right: tuple[int, ...], *ends: int) -> tuple[Any, ...]:
    """The call of a product in groups that end at `ends`, of whole numbers: sums of them are exact in bfloat16."""
    tensors = [f(*shape).round().clamp(-2, 2).bfloat16() for shape in (left, right)]
    return call(*tensors, torch.tensor(ends, dtype=torch.int32)) if ends else call(*tensors)


MATMUL = {
    aten._grouped_mm.default: [
        grouped((8, 8), (3, 8, 16), 2, 2, 8),
        grouped((16, 8), (8, 8), 3, 8),
        grouped((3, 8, 8), (8, 16), 5, 5, 16),
        grouped((3, 8, 16), (3, 16, 8)),
    ],
    aten._scaled_mm.default: [
        call(_eight, _transposed, torch.tensor(0.5), torch.tensor(2.0), out_dtype=torch.float32),
        call(_eight, _transposed, torch.tensor(0.5), torch.tensor(2.0), f(6).float(), out_dtype=torch.float32),
    ],
    aten._scaled_mm_v2.default: [
        call(*scaled(torch.tensor([0.5]), torch.tensor([2.0]), 0), None, torch.float32),
        call(*scaled(_rows, _columns, 1), None, torch.float32),
    ],
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
