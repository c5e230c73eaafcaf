"""Kinds of operators that several stages tell apart: copies, views, fills, operators of a template, indexed writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

COPIES = frozenset({
    aten.detach.default, aten.alias.default, aten.clone.default, aten.lift.default, aten.lift_fresh.default,
    aten.lift_fresh_copy.default, aten.contiguous.default, aten.detach_copy.default, aten.alias_copy.default,
})  # fmt: skip
"""Return their operand unchanged: in a functional program a copy is equivalent to the original."""

VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
"""Return their operand in another shape, with the elements where they are in memory."""

RESHAPERS = frozenset({
    aten.view.default, aten.reshape.default, aten.expand.default, aten._to_copy.default, aten.slice.Tensor,
    aten.repeat.default,
})  # fmt: skip
"""Return elements of their operand: unchanged, if the result has its shape and dtype."""

_KERNELS = frozenset({
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
})  # fmt: skip
"""Have kernels, though torch decomposes them in Python: into lookups, which some scales bring out of bounds."""


def is_composite(op: OpOverload) -> bool:
    """Test an operator for being no more than the operators that it calls."""
    return op not in _KERNELS and op._can_decompose()


_LIKE = """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided
"""
LIKE = frozenset(
    op
    for packet in (getattr(aten, name) for name in _LIKE.split())
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if sum(str(argument.type) == "Tensor" for argument in op._schema.arguments) == 1
)
"""Read the shape, dtype and strides of their only operand, and not its elements."""

_NUMBERS: Mapping[OpOverload, int] = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.zero.default: 0,
    aten._efficientzerotensor.default: 0, aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
_NUMBER_AT: Mapping[OpOverload, int] = {
    aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1, aten.fill.Scalar: 1,
    aten.new_full.default: 2,
}  # fmt: skip
FILLS = _NUMBERS.keys() | _NUMBER_AT.keys()
"""Return a tensor of which all elements are one number; see `fill_number`."""


def fill_number(op: OpOverload, args: Sequence[Any]) -> Any:
    """The number with which an operator in `FILLS` fills its result; None for other operators.

    >>> fill_number(aten.ones_like.default, (torch.zeros(2),)), fill_number(aten.full.default, ([2], 0.5))
    (1, 0.5)
    """
    return args[_NUMBER_AT[op]] if op in _NUMBER_AT else _NUMBERS.get(op)


FILLS_IN_PLACE = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
"""Write one number to all elements of their operand."""

INDEXED_WRITES = frozenset({aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default})
"""Write to the elements that a list of positions or masks selects."""
