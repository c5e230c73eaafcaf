"""Layer norm over trailing dims, which are not cut."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.rules.builders import dim_names, rule
from spmd.rules.notation import operand_names
from spmd.rules.partial import linear
from spmd.rules.rule import Call, FactorDims, Factors, Rule
from spmd.spec import TensorMeta

aten = torch.ops.aten

_PARAMETERS = ("weight", "bias")


def _norm(call: Call) -> Factors:
    """Tensors are whole, or statistics of the leading dims, or parameters over the normalized dims."""
    names = operand_names(call)
    whole = call.operands[names.index("input")]
    factors = dim_names(whole.ndim)
    leading = whole.ndim - len(call.argument("normalized_shape"))

    def place(meta: TensorMeta, parameter: bool) -> FactorDims:
        if parameter:
            return tuple((name,) for name in factors[leading:])
        statistic = meta.shape[leading:] != whole.shape[leading:]
        return tuple((name,) if i < leading or not statistic else () for i, name in enumerate(factors))

    backward = "output_mask" in {argument.name for argument in call.op._schema.arguments}
    # The gradient of the input comes first where it is asked for; those of the parameters follow.
    inputs = int(call.argument("output_mask")[0]) if backward else len(call.results)
    return Factors(
        tuple(place(meta, name in _PARAMETERS) for name, meta in zip(names, call.operands, strict=True)),
        tuple(place(meta, i >= inputs) for i, meta in enumerate(call.results)),
        dict(zip(factors, whole.shape, strict=True)),
        reduce=dict.fromkeys(factors[:leading], "sum") if backward else {},
        replicate=frozenset(factors[leading:]),
    )


NORMALIZATION: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.native_layer_norm.default: rule(_norm),
        aten.native_layer_norm_backward.default: rule(_norm, linear("grad_out")),
    }
)
