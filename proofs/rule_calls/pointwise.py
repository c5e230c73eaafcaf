"""Small calls of pointwise operators, and of their backward operators."""

from __future__ import annotations

import torch

from proofs.rule_calls.draws import Calls, Draws, call, each

aten = torch.ops.aten
_draws = Draws(0)
f, i, b = _draws.f, _draws.i, _draws.b


def binary() -> Calls:
    return [call(f(4, 5), f(4, 5)), call(f(4, 5), f(5)), call(f(4, 1), f(3, 1, 5)), call(f(4), f())]


POINTWISE = {
    aten.rrelu_with_noise_functional.default: [call(f(4, 5), f(4, 5), 0.1, 0.3, False)],
    aten.add.Tensor: [
        *binary(),
        call(f(4, 5), 2.0),
        call(f(4), f(4), alpha=-2.0),
        call(f(4), i(3, 4)),
        call(i(9, 4), 3),
    ],
    aten.add.Scalar: [call(f(4, 5), 2.0), call(f(4), 0)],
    aten.sub.Tensor: [*binary(), call(f(4, 5), 2.0), call(f(4), f(4), alpha=3.0), call(i(9, 4), i(9, 4))],
    aten.sub.Scalar: [call(f(4, 5), 2.0)],
    aten.rsub.Tensor: [*binary()],
    aten.rsub.Scalar: [call(f(4, 5), 2.0), call(f(4), 0)],
    aten.mul.Tensor: [*binary(), call(f(4, 5), -2.0), call(f(4), b(4)), call(i(5, 4), i(5, 4)), call(i(9, 4), 3)],
    aten.mul.Scalar: [call(f(4, 5), -2.0)],
    aten.div.Tensor: [*binary(), call(f(4, 5), -2.0), call(i(5, 4), 2)],
    aten.div.Scalar: [call(f(4, 5), -2.0)],
    aten.neg.default: [call(f(4, 5)), call(i(9, 4))],
    aten.addcmul.default: [call(f(4, 5), f(4, 5), f(5), value=-2.0)],
    aten.addcdiv.default: [call(f(4, 5), f(4, 5), f(5), value=-2.0)],
    aten.lerp.Scalar: [call(f(4, 5), f(4, 5), 0.3)],
    aten._standard_gamma_grad.default: [call(f(4, 5).exp(), f(4, 5).exp())],
    aten._dirichlet_grad.default: [call(f(4, 5).sigmoid(), f(4, 5).exp(), f(4, 5).exp() + 3)],
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
        call(i(9, 4), dtype=torch.int32),
        call(i(9, 4).int(), dtype=torch.int64),
        call(i(9, 4), dtype=torch.float32),
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
POINTWISE |= each(
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
        aten.hardshrink.default,
        aten.softshrink.default,
        aten.special_log_ndtr.default,
        aten.erfc.default,
        aten.special_erfcx.default,
        aten.elu.default,
        aten.celu.default,
        aten.leaky_relu.default,
    ],
    lambda: [call(f(4, 5)), call(f())],
)
POINTWISE |= each(
    [
        aten.silu_backward.default,
        aten.sigmoid_backward.default,
        aten.tanh_backward.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default,
        aten.mish_backward.default,
        aten.logaddexp.default,
        aten.logaddexp2.default,
        aten.clamp_max.Tensor,
        aten.clamp_min.Tensor,
        aten.ldexp.Tensor,
        aten.xlogy.Tensor,
        aten.special_xlog1py.default,
    ],
    lambda: [call(f(4, 5), f(4, 5))],
)
POINTWISE |= {
    aten.logit_backward.default: [call(f(4, 5), f(4, 5).sigmoid()), call(f(4, 5), f(4, 5), 0.1)],
    aten.conj_physical.default: [call(f(4, 5, dtype=torch.complex128)), call(f(4, 5))],
    aten._conj_physical.default: [call(f(4, 5, dtype=torch.complex128))],
}
