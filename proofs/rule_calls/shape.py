"""Small calls of the operators that move, split and join elements."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Draws, call

aten = torch.ops.aten
_draws = Draws(11)
f, i = _draws.f, _draws.i

_GAPS = torch.tensor([[torch.nan, 1.0, torch.inf, -torch.inf, 0.0], [0.5, -1.0, 2.0, torch.nan, -torch.inf]])

SHAPE = {
    aten.view.default: [
        call(f(4, 3, 5), [12, 5]),
        call(f(12, 5), [4, 3, 5]),
        call(f(4, 1, 6), [4, 2, 1, 3]),
        call(f(4, 6), [6, 4]),
        call(f(2, 6, 5), [4, 3, -1]),
        call(f(0, 6), [0, 2, 3]),
        call(f(1), []),
        call(f(2, 3, 4), [2, 12]),
    ],
    aten._unsafe_view.default: [call(f(4, 3, 5), [12, 5])],
    aten.reshape.default: [call(f(4, 3, 5), [12, 5])],
    aten.unsqueeze.default: [call(f(4, 5), 1), call(f(), 0)],
    aten.permute.default: [call(f(4, 5, 3), [2, 0, -2])],
    aten.transpose.int: [call(f(4, 5, 3), 0, -1), call(f(), 0, 0)],
    aten.t.default: [call(f(4, 5)), call(f(4))],
    aten.expand.default: [call(f(4, 1), [3, 4, 5]), call(f(), [4]), call(f(4, 5), [-1, 5])],
    aten.unfold.default: [call(f(4, 5, 3), 1, 2, 1), call(f(5), 0, 3, 2), call(f(7, 2), 0, 1, 2)],
    aten.unfold_backward.default: [
        call(f(4, 4, 3, 2), [4, 5, 3], 1, 2, 1),
        call(f(2, 3), [5], 0, 3, 2),
        call(f(4, 2, 1), [7, 2], 0, 1, 2),
    ],
    aten.diagonal_scatter.default: [
        call(f(4, 5, 3), f(3, 4)),
        call(f(4, 5, 3), f(5, 2), 1, 0, 2),
        call(f(6, 4), f(3), -3),
    ],
    aten.diagonal.default: [call(f(4, 5, 3)), call(f(4, 5, 3), 1, 0, 2), call(f(6, 4), -3)],
    aten.repeat.default: [call(f(4, 5), [2, 1, 3]), call(f(4, 5), [1, 2])],
    aten.cat.default: [
        call([f(4, 5), f(4, 3)], 1),
        call([f(4), f(0), f(3)]),
        call([f(4, 5), f(0)], 0),
        call([f(3, 2), f(3, 2), f(3, 2)]),
    ],
    aten.stack.default: [call([f(4, 5), f(4, 5)], 1), call([f(4), f(4)], -1)],
    aten.split.Tensor: [call(f(4, 5), 2, 1), call(f(4, 5), 4), call(f(7, 2), 3)],
    aten.split_with_sizes.default: [call(f(4, 5), [2, 3], -1), call(f(7, 2), [1, 0, 6])],
    aten.unbind.int: [call(f(4, 3), 1), call(f(2, 5))],
    aten.select.int: [call(f(4, 5), 1, 2), call(f(4, 5, 3), 0, -1)],
    aten.select_backward.default: [call(f(4, 3), [4, 5, 3], 1, 2)],
    aten.select_scatter.default: [call(f(4, 5, 3), f(4, 3), 1, 2)],
    aten.slice.Tensor: [
        call(f(4, 5), 1, 1, 3),
        call(f(4, 5), 0, 0, 9223372036854775807),
        call(f(4, 6), 1, 0, 6, 2),
        call(f(9, 2), 0, 1, 8, 3),
        call(f(9, 2), 0, 7, 8),
    ],
    aten.slice_backward.default: [
        call(f(4, 2), [4, 5], 1, 1, 3, 1),
        call(f(3, 2), [9, 2], 0, 1, 8, 3),
        call(f(4, 2), [7, 2], 0, 0, 9, 2),
    ],
    aten.slice_scatter.default: [call(f(4, 5), f(4, 2), 1, 1, 3), call(f(9, 2), f(3, 2), 0, 1, 8, 3)],
    aten.flip.default: [call(f(4, 5), [1]), call(f(4, 5, 3), [0, -1])],
    aten.roll.default: [call(f(4, 5), [1], [1]), call(f(4, 5), [2]), call(f(7, 5), [-2, 3], [0, 1])],
    aten.constant_pad_nd.default: [
        call(f(4, 5), [1, 2]),
        call(f(4, 5), [1, 2], 3.0),
        call(f(4, 5, 3), [0, 0, 1, -1]),
    ],
    aten.tril.default: [call(f(4, 5)), call(f(3, 4, 4), 1)],
    aten.triu.default: [call(f(4, 5)), call(f(3, 4, 4), -1)],
    aten.kthvalue.default: [call(f(4, 5), 2, 0), call(f(5, 3), 4, 0, True), call(_GAPS, 2, -1), call(f(), 1)],
    aten.mode.default: [call(i(3, 4, 5), 0)],
    aten.median.dim: [call(f(4, 5), 0)],
    aten.nanmedian.dim: [call(f(4, 5), 1)],
    aten.sort.default: [call(f(4, 5), 1), call(f(4, 5), 0, True)],
    aten.sort.stable: [call(f(4, 5), stable=True, dim=1)],
    aten.topk.default: [
        call(f(4, 5), 2),
        call(f(4, 5), 3, 0),
        call(f(7, 2), 5, 0, False),
        call(_GAPS, 3),
        call(_GAPS, 3, -1, False),
        call(f(4, 5), 0),
        call(f(), 1),
    ],
}
