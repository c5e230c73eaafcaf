"""Operators that draw random numbers from torch's default generator.

Every rank computes the whole result of each random operator, exactly once and in program order, and slices its shard
from it. So on every mesh the numbers are those of a single device after the same `torch.manual_seed`, and no
communication is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd.ir.operator_kinds import LIKE

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten


def is_random(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: attention without dropout does not, nor dropout outside of training.

    >>> x = torch.ones(2)
    >>> is_random(aten.bernoulli.p, (x, 0.0), {}), is_random(aten.native_dropout.default, (x, 0.5, False), {})
    (True, False)
    """
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)
    return given.get("dropout_p") != 0.0 and given.get("train") is not False and given.get("training") is not False


TEMPLATED = frozenset({
    *(op for op in LIKE if torch.Tag.nondeterministic_seeded in op.tags),
    aten.bernoulli.p, aten.cauchy.default, aten.exponential.default, aten.geometric.default, aten.log_normal.default,
    aten.normal_functional.default, aten.random.default, getattr(aten.random, "from"), aten.random.to,
    aten.uniform.default,
})  # fmt: skip
"""Random operators that read only the shape, dtype and strides of their first operand, and not its elements."""
