"""Operators that make tensors from sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.rules.builders import cut_all, dim_names, rule
from spmd.rules.notation import factors
from spmd.rules.partial import ignores, increasing, linear
from spmd.rules.rule import Call, Factors, Rule

aten = torch.ops.aten

_CONSTANT = factors(" -> ...", size_argument=0)


def _new(call: Call) -> Factors:
    (operand,), (result,) = call.operands, call.results
    names = dim_names(result.ndim)
    sizes = dict(zip(names, result.shape, strict=True))
    return Factors((((),) * operand.ndim,), (cut_all(result.shape, names),), sizes)


_NEW = rule(_new, ignores("self"), size_argument=1)

FACTORIES: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.full.default: _CONSTANT,
        aten.zeros.default: _CONSTANT,
        aten.ones.default: _CONSTANT,
        aten.empty.memory_format: _CONSTANT,
        aten.new_zeros.default: _NEW,
        aten.new_ones.default: _NEW,
        aten.new_full.default: _NEW,
        aten.new_empty.default: _NEW,
        aten.scalar_tensor.default: factors(" -> "),
        aten.linspace.default: factors(" -> _"),
        aten.logspace.default: factors(" -> _"),
        **{
            getattr(op, kind): factors(f"{operands} -> _", *rows)
            for op, rows in ((aten.linspace, (linear("start end"), increasing("start", "end"))), (aten.logspace, ()))
            for kind, operands in (("Tensor_Tensor", ","), ("Tensor_Scalar", ""), ("Scalar_Tensor", ""))
        },
        aten.arange.default: factors(" -> _"),
        aten.arange.start: factors(" -> _"),
        aten.arange.start_step: factors(" -> _"),
        aten.eye.default: factors(" -> _ _"),
        aten.eye.m: factors(" -> _ _"),
        aten.tril_indices.default: factors(" -> _ _"),
        aten.triu_indices.default: factors(" -> _ _"),
    }
)
