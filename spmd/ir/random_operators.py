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


def _uniform(
    low: float, high: float, size: Sequence[int], dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device).uniform_(low, high)


_LIBRARY = torch.library.Library("spmd_random", "FRAGMENT")
_LIBRARY.define(
    "uniform(float low, float high, SymInt[] size, *, ScalarType? dtype=None, Device? device=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("uniform", _uniform, "CompositeExplicitAutograd")
_OF_SHAPE: dict[OpOverload, tuple[OpOverload, tuple[float, ...]]] = {
    aten.rand_like.default: (aten.rand.default, ()),
    aten.randn_like.default: (aten.randn.default, ()),
    aten.normal_functional.default: (aten.normal.float_float, (0.0, 1.0)),
    aten.uniform.default: (torch.ops.spmd_random.uniform.default, (0.0, 1.0)),
}
"""Operators that draw what others draw for a template, by its shape; and the numbers that stand before the shape."""


def without_template(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[OpOverload, Any, Any]:
    """A random call of a new template; as one of its shape where there is such an operator, for a rank to hold less."""
    template, formats = args[0], (None, torch.preserve_format, torch.contiguous_format)
    is_dense = template.is_contiguous() and not template.is_complex()
    if op not in _OF_SHAPE or kwargs.get("memory_format") not in formats or not is_dense:
        return op, args, kwargs
    of_shape, defaults = _OF_SHAPE[op]
    own = {"dtype": template.dtype, "device": template.device}
    given = {name: value for name, value in kwargs.items() if value is not None and name != "memory_format"}
    numbers = (*args[1:], *defaults[len(args) - 1 :])
    return of_shape, (*numbers, list(template.shape)), {**own, **given}
