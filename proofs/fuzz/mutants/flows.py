"""Mutants of how partial values pass through operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from proofs.fuzz.mutants.mutant import mutant, of_rule, replaced
from spmd.core.placement import Partial
from spmd.ir.call import Call
from spmd.rules.notation import Rows
from spmd.rules.partial import increasing, keeps_max, linear
from spmd.rules.rule import Row

_PARTIAL = "spmd.rules.partial"


def _also(*rows: Rows) -> Any:
    """Add wrong rows to a rule."""
    return lambda call, factors: attrs.evolve(
        factors, rows=(*factors.rows, *(row for make in rows for row in make(call)))
    )


def _only(*rows: Rows) -> Any:
    """Replace the rows of a rule."""
    return lambda call, factors: _also(*rows)(call, attrs.evolve(factors, rows=()))


def _sum_to_max(call: Call) -> Iterator[Row]:
    """The row from a partial sum to a partial maximum, for operators of one tensor."""
    if len(call.operands) == 1:
        yield Row((Partial("sum"),), (Partial("max"),))


MUTANTS = (
    of_rule(
        "sum through exp",
        "the exponential of a partial sum is a partial sum",
        "exp",
        _also(linear("self")),
        "pending_exp",
    ),
    of_rule(
        "sum through sigmoid",
        "the sigmoid of a partial sum is a partial sum",
        "sigmoid",
        _also(linear("self")),
        "pending_sigmoid",
    ),
    of_rule(
        "sum through relu",
        "the positive part of a partial sum is a partial sum",
        "relu",
        _also(linear("self")),
        "pending_relu",
    ),
    of_rule(
        "sum in both factors",
        "a product of two partial sums is a partial sum",
        "mul.Tensor",
        _also(linear("self other")),
        "pending_product",
    ),
    of_rule(
        "sum in one summand",
        "a partial sum plus a value that every rank has is a partial sum",
        "add.Tensor",
        _only(linear("self", "other")),
        "pending_sum_of_one",
    ),
    of_rule(
        "sum and a number",
        "a partial sum plus a number is a partial sum",
        "add.Tensor",
        _also(linear("self")),
        "pending_number",
    ),
    of_rule(
        "sum in a divisor",
        "a quotient is linear in its divisor",
        "div.Tensor",
        _also(linear("other")),
        "pending_quotient",
    ),
    of_rule(
        "sum in a maximum",
        "the maximum of partial sums is a partial sum",
        "maximum",
        _also(linear("self other")),
        "pending_maximum_of_sums",
    ),
    of_rule(
        "sum in a choice",
        "a choice between a partial sum and a value that every rank has is a partial sum",
        "where.self",
        _only(linear("self", "other")),
        "pending_choice",
    ),
    of_rule(
        "sum in a comparison",
        "a comparison of a partial sum is a partial maximum",
        "gt.Scalar",
        _also(_sum_to_max),
        "pending_compared",
    ),
    mutant(
        "sum through casts",
        "a partial sum of floats is cast to integers on each rank",
        replaced(_PARTIAL, "_keeps_sums", lambda source, target: True),
        within="pending_cast",
    ),
    of_rule(
        "sum through sort",
        "partial sums are sorted on each rank",
        "sort sort.stable",
        _also(linear("self:0")),
        "pending_sort",
    ),
    of_rule(
        "sum through amax",
        "the maximum of partial sums is a partial sum",
        "amax",
        _also(linear("self")),
        "pending_amax",
    ),
    of_rule(
        "sum through softmax",
        "the softmax of partial sums is a partial sum",
        "_softmax",
        _also(linear("self")),
        "pending_softmax",
    ),
    of_rule(
        "sum in both matrices",
        "a product of two partial matrices is a partial sum",
        "mm bmm",
        _also(linear("self mat2")),
        "pending_matmul",
    ),
    of_rule(
        "max through neg",
        "the negative of a partial maximum is a partial maximum",
        "neg",
        _also(increasing("self")),
        "pending_neg",
    ),
    of_rule(
        "max through sub",
        "a difference is increasing in what is subtracted",
        "sub.Tensor",
        _also(increasing("other")),
        "pending_subtracted",
    ),
    of_rule(
        "max through abs",
        "the absolute value of a partial maximum is a partial maximum",
        "abs",
        _also(increasing("self")),
        "pending_abs",
    ),
    of_rule(
        "max in a minimum",
        "the minimum of two partial maxima is a partial maximum",
        "minimum",
        _also(keeps_max("self other")),
        "pending_minimum",
    ),
    mutant(
        "max times a negative number",
        "a negative factor keeps maxima",
        replaced(_PARTIAL, "_exchanged", lambda through: through),
        within="pending_negative",
    ),
    of_rule(
        "max through sum",
        "the sum of partial maxima is a partial maximum",
        "sum.dim_IntList",
        _also(increasing("self")),
        "pending_sum_of_maxima",
    ),
    of_rule(
        "max through lerp",
        "a point between a partial maximum and a number is a partial maximum, of infinity too",
        "lerp.Scalar",
        _also(increasing("self")),
        "pending_between",
    ),
    mutant(
        "infinity through casts",
        "a rank that holds nothing of a minimum casts infinity to an integer",
        replaced(_PARTIAL, "_has_infinity", lambda dtype: True),
        within="pending_rounded",
    ),
)
