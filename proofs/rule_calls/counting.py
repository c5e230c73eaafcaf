"""Small calls of the operators that count, and of those that find or arrange elements."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Draws, call

aten = torch.ops.aten
_draws = Draws(5)
f, b = _draws.f, _draws.b

_rows = f(3, 5).sort().values
_edges = torch.tensor([-2.0, -0.5, 0.0, 0.3, 1.0, 2.0], dtype=torch.float64)
_mixed = f(3, 5)

COUNTING = {
    aten.searchsorted.Tensor: [
        call(_rows, f(3, 4)),
        call(_rows[0], f(4, 3), right=True),
        call(_rows[0], f(7), out_int32=True),
        call(_rows[:, :1], f(3, 4), side="right"),
        call(_mixed, f(3, 4), sorter=_mixed.argsort()),
        call(_mixed[0], f(4, 3), sorter=_mixed[0].argsort()),
        call(torch.tensor([0.0, 1.0, 1.0, 1.0, torch.inf]), torch.tensor([1.0, torch.nan, torch.inf])),
    ],
    aten.searchsorted.Scalar: [call(_rows[0], 0.1), call(_rows[0], 3)],
    aten.bucketize.Tensor: [call(f(4, 5), _edges), call(f(7), _edges, right=True, out_int32=True), call(f(), _edges)],
    aten.bucketize.Scalar: [call(0.1, _edges)],
    aten.histc.default: [call(f(4, 5), 3, -1, 1), call(f(4, 5), 4), call(f(7), 5, -2, 2), call(torch.ones(5), 4)],
    aten.histogram.bins_tensor: [
        call(f(4, 5), _edges),
        call(f(4, 5), _edges, weight=f(4, 5)),
        call(f(7), _edges, density=True),
    ],
    aten.histogram.bin_ct: [
        call(f(4, 5), 3, range=[-1.0, 1.0]),
        call(f(7), 4),
        call(f(4), 4, weight=f(4)),
        call(f(4), 4, density=True),
    ],
    aten._histogramdd_bin_edges.default: [call(f(5, 2), [3, 2]), call(f(4, 2), [3, 2], range=[-1.0, 1.0, 0.0, 2.0])],
    aten._histogramdd_from_bin_cts.default: [
        call(f(5, 2), [3, 2]),
        call(f(3, 5, 2), [3, 2], weight=f(3, 5)),
        call(f(4, 2), [3, 2], range=[-1.0, 1.0, 0.0, 2.0]),
        call(f(4, 2), [3, 2], density=True),
    ],
    aten._histogramdd_from_bin_tensors.default: [call(f(4, 2), [_edges, _edges])],
    aten.nonzero_static.default: [call(b(4, 5), size=7)],
    aten.masked_scatter.default: [call(f(4, 5), b(4, 5), f(20))],
    aten.masked_scatter_backward.default: [call(f(4, 5), b(4, 5), [20])],
    aten.segment_reduce.default: [call(f(5, 3), "sum", lengths=torch.tensor([2, 0, 3]))],
    aten._segment_reduce_backward.default: [
        call(f(3, 2), f(3, 2), f(5, 2), "sum", lengths=torch.tensor([2, 0, 3])),
    ],
    aten.repeat_interleave.Tensor: [call(torch.tensor([2, 0, 3, 1]), output_size=6)],
    aten.resize.default: [call(f(4, 5), [2, 10])],
}
