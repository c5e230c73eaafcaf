"""Small calls of every operator that has a rule: what the rules are proved on.

Lengths 2 to 7 over two and three shards give even, uneven and empty shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from draws import Calls, Draws, call, each
from rule_calls_indexing import CHANCE as FEW_VALUES
from rule_calls_indexing import COUNTING, INDEXING, UNCHECKED
from rule_calls_linalg import LINALG
from rule_calls_order import CHANCE, ORDER
from rule_calls_pooling import POOLING
from rule_calls_spatial import SPATIAL

aten = torch.ops.aten
_draws = Draws(0)
f, i, b = _draws.f, _draws.i, _draws.b


def binary() -> Calls:
    return [call(f(4, 5), f(4, 5)), call(f(4, 5), f(5)), call(f(4, 1), f(3, 1, 5)), call(f(4), f())]


_POINTWISE = {
    aten.add.Tensor: [*binary(), call(f(4, 5), 2.0), call(f(4), f(4), alpha=-2.0), call(f(4), i(3, 4))],
    aten.add.Scalar: [call(f(4, 5), 2.0), call(f(4), 0)],
    aten.sub.Tensor: [*binary(), call(f(4, 5), 2.0), call(f(4), f(4), alpha=3.0)],
    aten.sub.Scalar: [call(f(4, 5), 2.0)],
    aten.rsub.Tensor: [*binary()],
    aten.rsub.Scalar: [call(f(4, 5), 2.0), call(f(4), 0)],
    aten.mul.Tensor: [*binary(), call(f(4, 5), -2.0), call(f(4), b(4)), call(i(5, 4), i(5, 4))],
    aten.mul.Scalar: [call(f(4, 5), -2.0)],
    aten.div.Tensor: [*binary(), call(f(4, 5), -2.0), call(i(5, 4), 2)],
    aten.div.Scalar: [call(f(4, 5), -2.0)],
    aten.neg.default: [call(f(4, 5))],
    aten.addcmul.default: [call(f(4, 5), f(4, 5), f(5), value=-2.0)],
    aten.addcdiv.default: [call(f(4, 5), f(4, 5), f(5), value=-2.0)],
    aten.lerp.Scalar: [call(f(4, 5), f(4, 5), 0.3)],
    aten.lerp.Tensor: [call(f(4, 5), f(4, 5), f(4, 5).sigmoid())],
    aten.where.self: [call(b(4, 5), f(4, 5), f(4, 5)), call(b(4, 1), f(5), f())],
    aten.where.ScalarOther: [call(b(4, 5), f(4, 5), 2.0), call(b(4, 5), f(4, 5), 0.0)],
    aten.where.ScalarSelf: [call(b(4, 5), 2.0, f(4, 5)), call(b(4, 5), 0.0, f(4, 5))],
    aten.masked_fill.Scalar: [call(f(3, 4, 5), b(4, 5), -torch.inf), call(f(4, 5), b(4, 5), 0)],
    aten.masked_fill.Tensor: [call(f(4, 5), b(4, 5), f())],
    aten.maximum.default: binary(),
    aten.minimum.default: binary(),
    aten.max.other: binary(),
    aten.min.other: binary(),
    aten._to_copy.default: [
        call(f(4, 5), dtype=torch.float32),
        call(i(5, 4), dtype=torch.float64),
        call(f(4), dtype=torch.int64),
        call(f(4), dtype=torch.bool),
        call(b(4), dtype=torch.float32),
    ],
    aten.copy.default: [call(f(4, 5), f(4, 5)), call(f(4, 5), f(5))],
    aten.fill.Tensor: [call(f(4, 5), f())],
    aten.fill.Scalar: [call(f(4, 5), 2.0)],
    aten.full_like.default: [call(f(4, 5), 2.0), call(i(3, 4), 2)],
    aten.clamp.default: [call(f(4, 5), -0.5, 0.5), call(f(4, 5), None, 0.5)],
    aten.clamp_min.default: [call(f(4, 5), 0.1)],
    aten.clamp_max.default: [call(f(4, 5), 0.1)],
    aten.gelu_backward.default: [call(f(4, 5), f(4, 5), approximate="tanh"), call(f(4, 5), f(4, 5))],
    aten.threshold_backward.default: [call(f(4, 5), f(4, 5), 0)],
    aten.softplus_backward.default: [call(f(4, 5), f(4, 5), 1, 20)],
    aten.leaky_relu_backward.default: [call(f(4, 5), f(4, 5), 0.1, False)],
    aten.elu_backward.default: [call(f(4, 5), 1, 1, 1, False, f(4, 5))],
    aten.hardshrink_backward.default: [call(f(4, 5), f(4, 5), 0.5)],
    aten.softshrink_backward.default: [call(f(4, 5), f(4, 5), 0.5)],
    aten.hardtanh_backward.default: [call(f(4, 5), f(4, 5), -1, 1)],
}
_POINTWISE |= each(
    [
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten.positive.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.relu.default,
        aten.relu6.default,
        aten.hardtanh.default,
        aten.hardsigmoid.default,
        aten.exp.default,
        aten.exp2.default,
        aten.expm1.default,
        aten.tanh.default,
        aten.sigmoid.default,
        aten.softplus.default,
        aten.erf.default,
        aten.atan.default,
        aten.asinh.default,
        aten.sinh.default,
        aten.sign.default,
        aten.sgn.default,
        aten.floor.default,
        aten.ceil.default,
        aten.trunc.default,
        aten.round.default,
    ],
    lambda: [call(f(4, 5)), call(f())],
)
_POINTWISE |= each(
    [
        aten.silu_backward.default,
        aten.sigmoid_backward.default,
        aten.tanh_backward.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default,
        aten.mish_backward.default,
    ],
    lambda: [call(f(4, 5), f(4, 5))],
)

_MATMUL = {
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

_SHAPE = {
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
    aten.unfold.default: [call(f(4, 5, 3), 1, 2, 1), call(f(5), 0, 3, 2)],
    aten.unfold_backward.default: [call(f(4, 4, 3, 2), [4, 5, 3], 1, 2, 1), call(f(2, 3), [5], 0, 3, 2)],
    aten.diagonal_scatter.default: [call(f(4, 5, 3), f(3, 4)), call(f(4, 5, 3), f(5, 2), 1, 0, 2)],
    aten.diagonal.default: [call(f(4, 5, 3)), call(f(4, 5, 3), 1, 0, 2)],
    aten.repeat.default: [call(f(4, 5), [2, 1, 3]), call(f(4, 5), [1, 2])],
    aten.cat.default: [call([f(4, 5), f(4, 3)], 1), call([f(4), f(0), f(3)]), call([f(4, 5), f(0)], 0)],
    aten.stack.default: [call([f(4, 5), f(4, 5)], 1), call([f(4), f(4)], -1)],
    aten.split.Tensor: [call(f(4, 5), 2, 1)],
    aten.split_with_sizes.default: [call(f(4, 5), [2, 3], -1)],
    aten.unbind.int: [call(f(4, 3), 1), call(f(2, 5))],
    aten.select.int: [call(f(4, 5), 1, 2), call(f(4, 5, 3), 0, -1)],
    aten.select_backward.default: [call(f(4, 3), [4, 5, 3], 1, 2)],
    aten.select_scatter.default: [call(f(4, 5, 3), f(4, 3), 1, 2)],
    aten.slice.Tensor: [call(f(4, 5), 1, 1, 3), call(f(4, 5), 0, 0, 9223372036854775807), call(f(4, 6), 1, 0, 6, 2)],
    aten.slice_backward.default: [call(f(4, 2), [4, 5], 1, 1, 3, 1)],
    aten.slice_scatter.default: [call(f(4, 5), f(4, 2), 1, 1, 3)],
    aten.flip.default: [call(f(4, 5), [1]), call(f(4, 5, 3), [0, -1])],
    aten.roll.default: [call(f(4, 5), [1], [1]), call(f(4, 5), [2])],
    aten.constant_pad_nd.default: [
        call(f(4, 5), [1, 2]),
        call(f(4, 5), [1, 2], 3.0),
        call(f(4, 5, 3), [0, 0, 1, -1]),
    ],
    aten.tril.default: [call(f(4, 5)), call(f(3, 4, 4), 1)],
    aten.triu.default: [call(f(4, 5)), call(f(3, 4, 4), -1)],
    aten.kthvalue.default: [call(f(4, 5), 2, 0)],
    aten.mode.default: [call(i(3, 4, 5), 0)],
    aten.median.dim: [call(f(4, 5), 0)],
    aten.nanmedian.dim: [call(f(4, 5), 1)],
    aten.sort.default: [call(f(4, 5), 1), call(f(4, 5), 0, True)],
    aten.sort.stable: [call(f(4, 5), stable=True, dim=1)],
    aten.topk.default: [call(f(4, 5), 2), call(f(4, 5), 3, 0)],
}

_INDEXING = {
    aten.index.Tensor: [
        call(f(4, 5), [i(4, 3)]),
        call(f(4, 5, 3), [None, i(5, 4, 2), i(3, 2)]),
        call(f(4, 5, 3), [i(4, 2), None, i(3, 2)]),
    ],
    aten.index_put.default: [
        call(f(4, 5), [torch.tensor([1, 3, 0])], f(3, 5)),
        call(f(4, 5), [torch.tensor([1, 1, 0])], f(5), True),
        call(f(4, 5, 3), [None, torch.tensor([1, 3])], f(4, 2, 3), True),
        call(f(4, 5), [torch.tensor([1, 3]), torch.tensor([2, 2])], f(2)),
    ],
    aten.index_select.default: [call(f(4, 5), 1, i(5, 4)), call(f(4, 5), 0, i(4, 7))],
    aten.index_add.default: [call(f(4, 5), 0, i(4, 6), f(6, 5)), call(f(4, 5), 1, i(5, 3), f(4, 3), alpha=-2.0)],
    aten.gather.default: [
        call(f(4, 5), 1, i(5, 4, 3)),
        call(f(4, 5), 0, i(4, 2, 3)),
        call(f(5), 0, i(5, 4)),
        call(f(5), 0, i(5, 2, 0)),
    ],
    aten.scatter.src: [
        call(f(4, 5), 1, torch.tensor([[0, 3], [1, 2], [4, 0], [2, 3]]), f(4, 2)),
        call(f(4, 5), 0, torch.tensor([[0, 3, 1]]), f(2, 5)),
    ],
    aten.scatter.value: [call(f(4, 5), 1, i(5, 4, 2), 2.0), call(f(4, 5), 1, i(5, 4, 2), 0)],
    aten.scatter_add.default: [call(f(4, 5), 1, i(5, 4, 6), f(4, 6)), call(f(4, 5), 0, i(4, 2, 3), f(3, 5))],
}

_FACTORIES = {
    aten.full.default: [call([4, 5], 2.0)],
    aten.zeros.default: [call([4, 5])],
    aten.ones.default: [call([4, 5])],
    aten.empty.memory_format: [call([4, 5])],
    aten.new_zeros.default: [call(f(3), [4, 5])],
    aten.new_ones.default: [call(f(3), [4, 5])],
    aten.new_full.default: [call(f(3), [4, 5], 2.0)],
    aten.new_empty.default: [call(f(3), [4, 5])],
    aten.scalar_tensor.default: [call(2.0)],
    aten.linspace.default: [call(0, 2, 5)],
    aten.linspace.Tensor_Tensor: [call(f(), f(), 5)],
    aten.linspace.Tensor_Scalar: [call(f(), 2, 5)],
    aten.linspace.Scalar_Tensor: [call(0, f(), 5)],
    aten.logspace.default: [call(0, 2, 5)],
    aten.logspace.Tensor_Tensor: [call(f(), f(), 5)],
    aten.logspace.Tensor_Scalar: [call(f(), 2, 5)],
    aten.logspace.Scalar_Tensor: [call(0, f(), 5)],
    aten.arange.default: [call(5)],
    aten.arange.start: [call(2, 7)],
    aten.arange.start_step: [call(2, 7, 2)],
    aten.eye.default: [call(4)],
    aten.eye.m: [call(4, 3)],
    aten.tril_indices.default: [call(4, 4)],
    aten.triu_indices.default: [call(4, 4)],
}


def reduced() -> Calls:
    return [call(f(4, 5), [1]), call(f(4, 5, 3), [0, -1], True), call(f(4, 5), [0])]


def by_dim() -> Calls:
    return [call(f(4, 5), 1), call(f(4, 5), 0, True)]


_REDUCTION = {
    aten.sum.default: [call(f(4, 5)), call(i(5, 4)), call(b(4)), call(f())],
    aten.sum.dim_IntList: [*reduced(), call(f(4, 5), []), call(f(4, 5), None), call(i(5, 4, 3), [0])],
    aten.mean.default: [call(f(4, 5))],
    aten.mean.dim: reduced(),
    aten.amax.default: [*reduced(), call(i(5, 4, 3), [0]), call(f(4, 5))],
    aten.amin.default: [*reduced(), call(i(5, 4, 3), [0])],
    aten.max.default: [call(f(4, 5)), call(i(5, 4))],
    aten.min.default: [call(f(4, 5))],
    aten.any.default: [call(b(4, 5)), call(torch.zeros(4, dtype=torch.bool))],
    aten.any.dim: [call(b(4, 5), 1)],
    aten.any.dims: [call(b(4, 5), [0, 1]), call(torch.zeros(4, 5, dtype=torch.bool), [0, 1])],
    aten.all.default: [call(b(4, 5)), call(torch.ones(4, dtype=torch.bool))],
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


def norm_backward(mask: Sequence[bool], weight: torch.Tensor | None, bias: torch.Tensor | None) -> Calls:
    x = f(4, 2, 5)
    _, mean, rstd = aten.native_layer_norm.default(x, [5], weight, bias, 1e-5)
    return [call(f(4, 2, 5), x, [5], mean, rstd, weight, bias, list(mask))]


_NORMALIZATION = {
    aten.native_layer_norm.default: [
        call(f(4, 2, 5), [5], f(5), f(5), 1e-5),
        call(f(4, 2, 5), [2, 5], None, None, 1e-5),
    ],
    aten.native_layer_norm_backward.default: [
        *norm_backward((True, True, True), f(5), f(5)),
        *norm_backward((True, False, False), None, None),
        *norm_backward((False, True, True), f(5), f(5)),
    ],
}

_flash = aten._scaled_dot_product_flash_attention_for_cpu.default


def attention_backward(causal: bool, mask: torch.Tensor | None) -> Calls:
    q, k, v = f(2, 3, 4, 8), f(2, 3, 6, 8), f(2, 3, 6, 8)
    out, logsumexp = _flash(q, k, v, 0.0, causal, attn_mask=mask)
    return [call(f(2, 3, 4, 8), q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask)]


_ATTENTION = {
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

_EMBEDDING = {
    aten.embedding.default: [call(f(5, 3), i(5, 4, 2)), call(f(4, 3), i(4, 7), 1), call(f(4, 3), i(4))],
    aten.embedding_dense_backward.default: [
        call(f(4, 2, 3), i(5, 4, 2), 5, -1, False),
        call(f(7, 3), torch.tensor([0, 1, 1, 2, 3, 3, 3]), 4, 1, False),
        call(f(7, 3), torch.tensor([0, 1, 1, 2, 3, 3, 3]), 4, -1, True),
    ],
}

_REDUCTIONS = (0, 1, 2)


def nll() -> Calls:
    target = torch.tensor([0, 2, 4, 2])
    weight = f(5).exp()
    return [
        *(call(f(4, 5), target, w, r, ignore) for r in _REDUCTIONS for w, ignore in ((None, -100), (weight, 2))),
        *(call(f(5), torch.tensor(3), None, r, -100) for r in _REDUCTIONS),
    ]


def nll_backward(forward: torch._ops.OpOverload, calls: Calls) -> Calls:
    found = []
    for args, _ in calls:
        loss, total = forward(*args)
        found.append(call(f(*loss.shape), *args, total))
    return found


def nll2d() -> Calls:
    weight = f(4).exp()
    return [call(f(2, 4, 3, 5), i(4, 2, 3, 5), weight, r, 2) for r in _REDUCTIONS]


def losses(*rest: Any) -> Calls:
    return [call(f(4, 5), f(4, 5), r, *rest) for r in _REDUCTIONS]


def losses_backward(*rest: Any) -> Calls:
    return [
        *(call(f(), f(4, 5), f(4, 5), r, *rest) for r in (1, 2)),
        call(f(4, 5), f(4, 5), f(4, 5), 0, *rest),
    ]


def probabilities(*shape: int) -> torch.Tensor:
    return f(*shape).sigmoid()


_LOSS = {
    aten.nll_loss_forward.default: nll(),
    aten.nll_loss_backward.default: nll_backward(aten.nll_loss_forward.default, nll()),
    aten.nll_loss2d_forward.default: nll2d(),
    aten.nll_loss2d_backward.default: nll_backward(aten.nll_loss2d_forward.default, nll2d()),
    aten.mse_loss.default: losses(),
    aten.mse_loss_backward.default: losses_backward(),
    aten.smooth_l1_loss.default: losses(0.5),
    aten.smooth_l1_loss_backward.default: losses_backward(0.5),
    aten.huber_loss.default: losses(0.5),
    aten.huber_loss_backward.default: losses_backward(0.5),
    aten.binary_cross_entropy.default: [
        call(probabilities(4, 5), probabilities(4, 5), w, r) for r in _REDUCTIONS for w in (None, f(4, 5))
    ],
    aten.binary_cross_entropy_backward.default: [
        call(f() if r else f(4, 5), probabilities(4, 5), probabilities(4, 5), w, r)
        for r in _REDUCTIONS
        for w in (None, f(4, 5))
    ],
}

CALLS: Mapping[torch._ops.OpOverload, Calls] = (
    _POINTWISE
    | _MATMUL
    | _SHAPE
    | _INDEXING
    | _FACTORIES
    | _REDUCTION
    | _NORMALIZATION
    | _ATTENTION
    | _EMBEDDING
    | _LOSS
    | ORDER
    | INDEXING
    | COUNTING
    | LINALG
    | POOLING
    | SPATIAL
)
"""For every operator of `RULES`, arguments and keyword arguments of some calls."""

ARBITRARY = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default})
"""Operators whose values mean nothing."""

UNSEARCHED = frozenset(
    {
        *_NORMALIZATION,
        *_ATTENTION,
        *_EMBEDDING,
        *UNCHECKED,
        *LINALG,
        *POOLING,
        *SPATIAL,
        *(op for op in _LOSS if "nll" in str(op)),
    }
)
"""Operators whose kernels do not check that shapes fit together, and read or write out of bounds where they do not."""

BY_CHANCE = "right by chance, for few values"

INCOMPLETE = {
    "max and min through a product with a tensor of known sign": (
        aten.mul.Tensor, aten.div.Tensor, aten.lerp.Scalar, aten.lerp.Tensor, aten.threshold_backward.default,
        aten.softplus_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
        aten.hardtanh_backward.default, aten.hardsigmoid_backward.default, aten.binary_cross_entropy.default,
    ),
    "max and min through powers, by their base": (
        aten.logspace.Tensor_Tensor, aten.logspace.Tensor_Scalar, aten.logspace.Scalar_Tensor,
    ),
    "infinities absorb any sum": (aten.masked_fill.Scalar,),
    BY_CHANCE: (
        aten.minimum.default, aten.max.other, aten.min.other, aten._to_copy.default,
        aten.relu.default, aten.relu6.default, aten.sign.default, aten.sgn.default,
        aten.prod.default, aten.sum.default, aten.any.default, aten.any.dims, aten.all.default, aten.all.dims,
        aten.logsumexp.default, aten.linalg_vector_norm.default, aten.scatter.value, *CHANCE, *FEW_VALUES,
        aten.index_add.default, aten.index_put.default, aten.scatter_add.default, aten.silu_backward.default,
        aten.median.default, aten.nanmedian.default,
    ),
    "operands whose values are ignored": (
        aten.copy.default, aten.fill.Tensor, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    ),
}  # fmt: skip
"""Operators of which some right rows are known to be missing, by reason."""
