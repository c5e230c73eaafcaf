"""Pointwise operators whose rules say more than torch's tag, such as linearity and monotonicity, or that lack it."""

from __future__ import annotations

import functools

from spmd.rules.builders import pointwise
from spmd.rules.notation import Rows
from spmd.rules.partial import carry, decreasing, ignores, increasing, keeps_max, keeps_min, linear
from spmd.rules.rule import table

_EITHER = increasing("self", "other")

# Only operators that are nondecreasing on the whole real line, as the ranks' values of a Partial can be any numbers.
_INCREASING = """
    relu relu6 hardtanh hardsigmoid clamp clamp_min clamp_max exp exp2 expm1 tanh sigmoid softplus erf atan asinh sinh
    sign sgn floor ceil trunc round
"""

_BACKWARD = """
    gelu_backward silu_backward sigmoid_backward tanh_backward hardswish_backward
    mish_backward
"""

# The derivative is never negative.
_INCREASING_BACKWARD = """
    threshold_backward softplus_backward hardtanh_backward hardsigmoid_backward hardshrink_backward softshrink_backward
"""


_ELU = ("alpha", "scale", "input_scale")


def _if_positive(flow: Rows, *names: str) -> Rows:
    """The rows of `flow`, for calls in which the numbers `names` are positive."""
    return lambda call: flow(call) if all(call.argument(name) > 0 for name in names) else iter(())


_up, _down = functools.partial(increasing, arithmetic=True), functools.partial(decreasing, arithmetic=True)

POINTWISE = table({
    "add.Tensor add.Scalar": pointwise(linear("self other"), _up("self"), _up("other", times="alpha")),
    "sub.Tensor sub.Scalar": pointwise(linear("self other"), _up("self"), _down("other", times="alpha")),
    "rsub.Tensor rsub.Scalar": pointwise(linear("self other"), _up("other"), _down("self", times="alpha")),
    "mul.Tensor mul.Scalar": pointwise(linear("self", "other"), _up("self", times="other")),
    "div.Tensor div.Scalar": pointwise(linear("self"), increasing("self", times="other")),
    "neg": pointwise(linear("self"), _down("self")),
    "addcmul": pointwise(linear("self tensor1", "self tensor2"), _up("self")),
    "addcdiv": pointwise(linear("self tensor1"), _up("self")),
    "xlogy.Tensor special_xlog1py": pointwise(linear("self")),
    "leaky_relu": pointwise(_if_positive(increasing("self"), "negative_slope")),
    "celu": pointwise(_if_positive(increasing("self"), "alpha")),
    "elu": pointwise(_if_positive(increasing("self"), *_ELU)),
    "leaky_relu_backward": pointwise(linear("grad_output"), _if_positive(increasing("grad_output"), "negative_slope")),
    "elu_backward": pointwise(linear("grad_output"), _if_positive(increasing("grad_output"), *_ELU)),
    "lerp.Tensor lerp.Scalar": pointwise(linear("self end")),
    "where.self": pointwise(carry("self other"), _EITHER),
    "where.ScalarOther": pointwise(linear("self other"), increasing("self")),
    "where.ScalarSelf": pointwise(linear("self other"), increasing("other")),
    "masked_fill.Scalar": pointwise(linear("self value"), increasing("self")),
    "masked_fill.Tensor": pointwise(carry("self value"), increasing("self", "value")),
    "maximum max.other": pointwise(_EITHER, keeps_max("self other")),
    "minimum min.other": pointwise(_EITHER, keeps_min("self other")),
    "clone alias detach lift_fresh_copy positive": pointwise(carry("self")),
    "_to_copy": pointwise(linear("self"), increasing("self")),
    "copy": pointwise(linear("src"), increasing("src"), ignores("self")),
    "fill.Tensor": pointwise(linear("value"), increasing("value"), ignores("self")),
    "zeros_like ones_like full_like empty_like fill.Scalar": pointwise(ignores("self")),
    _INCREASING: pointwise(increasing("self")),
    _BACKWARD: pointwise(linear("grad_output")),
    _INCREASING_BACKWARD: pointwise(carry("grad_output", "grad_out")),
    "hardshrink softshrink special_log_ndtr": pointwise(increasing("self")),
    "erfc special_erfcx": pointwise(decreasing("self")),
    "logaddexp logaddexp2": pointwise(_EITHER),
    "clamp_max.Tensor": pointwise(increasing("self", "max"), keeps_min("self max")),
    "clamp_min.Tensor": pointwise(increasing("self", "min"), keeps_max("self min")),
    "ldexp.Tensor": pointwise(carry("self")),
    "logit_backward": pointwise(carry("grad_output")),
    "conj_physical _conj_physical": pointwise(carry("self")),
    "rrelu_with_noise_functional _standard_gamma_grad _dirichlet_grad": pointwise(),
})  # fmt: skip
