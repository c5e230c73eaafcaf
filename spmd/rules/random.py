"""Draws of random numbers: whole on every rank, as `spmd.draws` explains."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from spmd.rules.rule import Call, Factors, Rule


def _whole(call: Call) -> Factors:
    operands, results = (tuple(((),) * meta.ndim for meta in metas) for metas in (call.operands, call.results))
    return Factors(operands, results, {})


DRAW = Rule(_whole)
"""The rule of a call that draws, whatever the rule of its operator without a draw."""

RANDOM: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType({torch.ops.aten.empty_strided.default: DRAW})
"""`empty_strided` is what draws fill."""
