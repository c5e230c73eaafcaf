"""The pool: all operators that programs are generated from, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from proofs.fuzz.pool import (
    casts,
    fourier,
    gradients,
    indexing,
    inner,
    inplace,
    linalg,
    lists,
    losses,
    matmul,
    network,
    order,
    pending,
    pointwise,
    random,
    reductions,
    shapes,
    steered,
    views,
)
from proofs.fuzz.pool.loops import LOOPS
from proofs.fuzz.pool.operator import Operator

FAMILIES = (
    casts,
    fourier,
    gradients,
    indexing,
    inner,
    inplace,
    linalg,
    lists,
    losses,
    matmul,
    network,
    order,
    pending,
    pointwise,
    random,
    reductions,
    shapes,
    steered,
    views,
)

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {name: operator for family in FAMILIES for name, operator in family.OPERATORS.items()}
)
"""All operators of the pool, by name."""

_HARD_TO_PLACE = (
    "complex_cumsum complex_reciprocal complex_square imag inplace_complex ifft2 quantile all bool_and bool_xor "
    "bool_to_float shift_left int_sign int_to_float int_true_divide"
)
"""Operators that often find no suitable operand, so that few programs would have them."""

_SELDOM_SHOWS = (
    "complex_mm complex_sum inplace_through_strides inplace_expanded as_strided_as_laid_out draw_after_write "
    "inplace_lerp_pushed rand_twice rand_unused rand_inplace rand_in_memory_order logsumexp layer_norm "
    "grad_of_layer_norm cross"
)
"""Operators in which a defect changes the results of few programs that have them."""

_MORE_THAN_ONCE = {
    **dict.fromkeys(_HARD_TO_PLACE.split(), 2),
    **dict.fromkeys(_SELDOM_SHOWS.split(), 3),
    **dict.fromkeys(["attention_transposed", "grad_of_attention"], 4),
    **dict.fromkeys(pending.OPERATORS, 4),
    "pending_minimum": 6,
    **dict.fromkeys(steered.OPERATORS, 2),
    **dict.fromkeys(["all_of_parts", "extremes_of_many", "shards_of_table"], 4),
    "list_of_reductions": 6,
    **dict.fromkeys(steered.OF_TWO_AXES, 6),
}

WEIGHTS: Mapping[str, int] = MappingProxyType({name: _MORE_THAN_ONCE.get(name, 1) for name in OPERATORS})
"""The relative frequency of each operator; higher if a defect shows only under placements that plans rarely use."""

__all__ = ["LOOPS", "OPERATORS", "WEIGHTS"]
