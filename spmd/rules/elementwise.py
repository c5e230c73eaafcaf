"""Pointwise operators that need more than their tag: linearity, monotonicity, or a tag that torch forgot."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.rules.builders import pointwise
from spmd.rules.partial import carry, decreasing, ignores, increasing, keeps_max, keeps_min, linear
from spmd.rules.rule import Rule

aten = torch.ops.aten

_ADD = pointwise(linear("self other"), increasing("self"), increasing("other", times="alpha"))
_SUB = pointwise(linear("self other"), increasing("self"), decreasing("other", times="alpha"))
_RSUB = pointwise(linear("self other"), increasing("other"), decreasing("self", times="alpha"))
_MUL = pointwise(linear("self", "other"), increasing("self", times="other"))
_DIV = pointwise(linear("self"), increasing("self", times="other"))

_ARITHMETIC = {
    aten.add.Tensor: _ADD,
    aten.add.Scalar: _ADD,
    aten.sub.Tensor: _SUB,
    aten.sub.Scalar: _SUB,
    aten.rsub.Tensor: _RSUB,
    aten.rsub.Scalar: _RSUB,
    aten.mul.Tensor: _MUL,
    aten.mul.Scalar: _MUL,
    aten.div.Tensor: _DIV,
    aten.div.Scalar: _DIV,
    aten.neg.default: pointwise(linear("self"), decreasing("self")),
    aten.addcmul.default: pointwise(linear("self tensor1", "self tensor2"), increasing("self")),
    aten.addcdiv.default: pointwise(linear("self tensor1"), increasing("self")),
    aten.lerp.Scalar: pointwise(linear("self end")),
    aten.lerp.Tensor: pointwise(linear("self end")),
}

_CHOICE = {
    aten.where.self: pointwise(carry("self other"), increasing("self", "other")),
    aten.where.ScalarOther: pointwise(linear("self other"), increasing("self")),
    aten.where.ScalarSelf: pointwise(linear("self other"), increasing("other")),
    aten.masked_fill.Scalar: pointwise(linear("self value"), increasing("self")),
    aten.masked_fill.Tensor: pointwise(carry("self value"), increasing("self", "value")),
    aten.maximum.default: pointwise(increasing("self", "other"), keeps_max("self other")),
    aten.minimum.default: pointwise(increasing("self", "other"), keeps_min("self other")),
    aten.max.other: pointwise(increasing("self", "other"), keeps_max("self other")),
    aten.min.other: pointwise(increasing("self", "other"), keeps_min("self other")),
}

_COPIES = {
    op: pointwise(carry("self"))
    for op in (
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten.positive.default,
    )
} | {
    aten._to_copy.default: pointwise(linear("self"), increasing("self")),
    aten.copy.default: pointwise(linear("src"), increasing("src"), ignores("self")),
    aten.fill.Tensor: pointwise(linear("value"), increasing("value"), ignores("self")),
}

_LIKE = {
    op: pointwise(ignores("self"))
    for op in (
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.fill.Scalar,
    )
}

# Only operators that never decrease on all of the real line: the ranks' values of a Partial may lie anywhere on it.
_INCREASING = {
    op: pointwise(increasing("self"))
    for op in (
        aten.relu.default,
        aten.relu6.default,
        aten.hardtanh.default,
        aten.hardsigmoid.default,
        aten.clamp.default,
        aten.clamp_min.default,
        aten.clamp_max.default,
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
    )
}

_BACKWARD = {
    op: pointwise(linear("grad_output"))
    for op in (
        aten.gelu_backward.default,
        aten.silu_backward.default,
        aten.sigmoid_backward.default,
        aten.tanh_backward.default,
        aten.threshold_backward.default,
        aten.softplus_backward.default,
        aten.leaky_relu_backward.default,
        aten.elu_backward.default,
        aten.hardtanh_backward.default,
        aten.hardswish_backward.default,
        aten.hardsigmoid_backward.default,
        aten.mish_backward.default,
    )
}

_SHRINK = {
    aten.hardshrink_backward.default: pointwise(linear("grad_out")),
    aten.softshrink_backward.default: pointwise(linear("grad_output")),
}

POINTWISE: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    _ARITHMETIC | _CHOICE | _COPIES | _LIKE | _INCREASING | _BACKWARD | _SHRINK
)
