"""The rule of an operator that returns nothing, `b i ->`, for its effectful form, which returns an empty tensor."""

from __future__ import annotations

import functools

import attrs
import torch

from spmd.core.placement import Replicate
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.rule import Factors, Rule

_NOTHING = TensorMeta((), torch.float32)
"""The stand-in for results that an operator does not have."""


@functools.cache
def without_results(rule: Rule) -> Rule:
    """The rule of an effectful form: the operator runs on the shards of a rank, which contribute to no result."""

    def factorize(call: Call) -> Factors:
        found = rule.factorize(attrs.evolve(call, results=(_NOTHING,)))
        rows = tuple(attrs.evolve(row, results=(Replicate(),)) for row in found.rows)
        free = frozenset(found.sizes) - found.replicate
        return attrs.evolve(found, results=(((),),), reduce={}, independent=free, rows=rows)

    return attrs.evolve(rule, factorize=factorize)
