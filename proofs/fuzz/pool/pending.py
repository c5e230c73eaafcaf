"""Operators from partial operands to partial results; few of them may run without a reduction first."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator
from spmd.core.placement import Reduction
from spmd.core.spec import P


def _between(text: str, reduction: Reduction = "sum", result: Reduction | None = None) -> Operator:
    """An operator of `x`, which is partial, with a partial result; `y` is replicated or sharded.

    Args:
        text: the expression; `{z}` is another value with the same reduction as `x`.
        reduction: the reduction of `x`.
        result: the reduction of the result; by default, that of `x`.
    """

    def operator(d: Draw) -> str:
        first = d.floats((1, 3), where=lambda t: t.numel() and t.shape[-1] > 1, make=lambda: (d.integer(1, 3), 4))
        second, y = d.like(first), d.like(first)
        axis = d.axis()
        # The parts have both signs and different orders, so that most operators do not commute with the reduction.
        other = f"({second}.flip(-1) * 5).sin()"
        parts = {"x": f"torch.stack([{first}, {other}])", "z": f"torch.stack([{other} * 0.7 + 0.3, {first}])"}
        plain = {name: f"{stacked}.{_REDUCED[reduction]}(0)" for name, stacked in parts.items()}
        pending = {name: _pending(stacked, axis, reduction) for name, stacked in parts.items()}
        found = f"spmd.reshard({text.format(y=y, **pending)}, {P(partial={axis: result or reduction})!r})"
        return f"({found} if is_tracing() else ({text.format(y=y, **plain)}).clone())"

    return operator


_REDUCED: Mapping[Reduction, str] = {"sum": "sum", "max": "amax", "min": "amin"}


def _pending(stacked: str, axis: str, reduction: Reduction) -> str:
    """A partial value: the reduction of a stack of parts, which is sharded over an axis."""
    reduced = f"spmd.constrain({stacked}, {P(axis)!r}).{_REDUCED[reduction]}(0)"
    return f"spmd.constrain({reduced}, {P(partial={axis: reduction})!r})"


OPERATORS: Mapping[str, Operator] = {
    "pending_exp": _between("{x}.exp()"),
    "pending_sigmoid": _between("{x}.sigmoid()"),
    "pending_relu": _between("{x}.relu()"),
    "pending_product": _between("({x} * {z})"),
    "pending_scaled": _between("({x} * {y})"),
    "pending_sum_of_one": _between("({x} + {y})"),
    "pending_sum_of_both": _between("({x} - {z})"),
    "pending_number": _between("({x} + 1.3)"),
    "pending_quotient": _between("({y} / {x})"),
    "pending_maximum_of_sums": _between("torch.maximum({x}, {z})"),
    "pending_choice": _between("torch.where({y} > 0, {x}, {y})"),
    "pending_compared": _between("({x} > 0.4)", result="max"),
    "pending_cast": _between("({x} * 3).long()"),
    "pending_sort": _between("{x}.sort(-1).values"),
    "pending_amax": _between("{x}.amax(-1)"),
    "pending_softmax": _between("{x}.softmax(-1)"),
    "pending_matmul": _between("({x} @ {z}.mT if {y}.ndim > 1 else {x} * {y})"),
    "pending_neg": _between("-{x}", "max"),
    "pending_subtracted": _between("({y} - {x})", "max"),
    "pending_abs": _between("{x}.abs()", "max"),
    "pending_minimum": _between("torch.minimum({x}, {z})", "max"),
    "pending_negative": _between("({x} * -1.3)", "max"),
    "pending_sum_of_maxima": _between("{x}.sum(-1)", "max"),
    "pending_between": _between("torch.lerp({x}, {y}, 0.3)", "max"),
    "pending_rounded": _between("({x} * 3).long()", "min"),
    "pending_flipped": _between("{x}.flip(0)", "min"),
    "pending_increasing": _between("({x} * 0.5).sinh()", "min"),
}
