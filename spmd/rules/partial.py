"""How Partial values flow through operators: linearity and monotonicity, declared by argument name.

Each declaration takes *groups*, words of argument names: the arguments of one group are Partial together and all others
replicated. `linear("self other")` is joint linearity (addition), `linear("self", "other")` multilinearity
(multiplication). `"self:0"` makes only result 0 Partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import attrs
import torch

from spmd.core.placement import Partial, Placement, Reduction, Replicate
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules.notation import operand_names
from spmd.rules.rule import Row

Through: TypeAlias = tuple[tuple[Reduction, Reduction | None], ...]

_SUM: Through = (("sum", "sum"),)
_UP: Through = (("max", "max"), ("min", "min"))
_DOWN: Through = (("max", "min"), ("min", "max"))


@attrs.frozen
class Flow:
    """Rows with Partial operands: `through` maps the reduction of a group's arguments to that of the results.

    Where the argument `times` names a number, its sign decides: a negative one exchanges max and min.
    """

    groups: tuple[str, ...]
    through: Through
    times: str | None = None

    def __call__(self, call: Call) -> Iterator[Row]:
        """The rows of one call."""
        factor = call.argument(self.times) if self.times else 1
        if isinstance(factor, (TensorMeta, complex)) or not factor:
            return
        through = self.through if factor > 0 else _exchanged(self.through)
        for group in self.groups:
            words, _, results = group.partition(":")
            for source, target in through:
                row = _row(call, words.split(), source, target, {int(index) for index in results.split()})
                if row is not None:
                    yield row


def linear(*groups: str) -> Flow:
    """Partial sums stay partial sums through a (multi)linear operator; a number in a group must be zero."""
    return Flow(groups, _SUM)


def increasing(*groups: str, times: str | None = None) -> Flow:
    """Partial max and min stay so through an operator that never decreases in any of a group's arguments."""
    return Flow(groups, _UP, times)


def decreasing(*groups: str, times: str | None = None) -> Flow:
    """Partial max becomes min, and min max, through an operator that never increases."""
    return Flow(groups, _DOWN, times)


def carry(*groups: str) -> Flow:
    """Every Partial stays: for operators that only move, copy or drop elements, or fill in zeros."""
    return Flow(groups, _SUM + _UP)


def ignores(*groups: str) -> Flow:
    """The values of these arguments do not matter, only their shape and dtype."""
    return Flow(groups, (("sum", None), ("max", None), ("min", None)))


def keeps_max(*groups: str) -> Flow:
    """Partial max stays through a maximum over elements."""
    return Flow(groups, (("max", "max"),))


def keeps_min(*groups: str) -> Flow:
    """Partial min stays through a minimum over elements."""
    return Flow(groups, (("min", "min"),))


def _exchanged(through: Through) -> Through:
    other: dict[Reduction | None, Reduction] = {"max": "min", "min": "max"}
    return tuple((source, other.get(target, target)) for source, target in through)


def _row(call: Call, group: list[str], source: Reduction, target: Reduction | None, only: set[int]) -> Row | None:
    member = [name in group for name in operand_names(call)]
    operands: tuple[Placement, ...] = tuple(Partial(source) if inside else Replicate() for inside in member)
    dtypes = [meta.dtype for meta, inside in zip(call.operands, member, strict=True) if inside]
    results = [i for i in range(len(call.results)) if not only or i in only]
    if not dtypes:
        return None
    if source == "sum" and target is not None:
        if any(isinstance(call.argument(name), (int, float, complex)) and call.argument(name) for name in group):
            return None
        if not all(_keeps_sums(dtype, call.results[i].dtype) for i in results for dtype in dtypes):
            return None
    if source != "sum" and target is not None:
        to_bool = any(call.results[i].dtype == torch.bool for i in results) and dtypes[0] != torch.bool
        infinite = [dtype.is_floating_point for dtype in dtypes]  # a rank that holds nothing has an infinite number
        if any(infinite) and not all(_has_infinity(call.results[i].dtype) for i in results):
            return None
        if to_bool or any(dtype.is_complex for dtype in (*dtypes, *(call.results[i].dtype for i in results))):
            return None
    placed = Replicate() if target is None else Partial(target)
    return Row(operands, tuple(placed if i in results else Replicate() for i in range(len(call.results))))


def _has_infinity(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and "fn" not in str(dtype)  # as in float8_e4m3fn: finite numbers and nan


def _keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether converting a sum is summing what is converted (up to rounding of floats)."""
    if torch.bool in (source, target):
        return False
    return target.is_floating_point or target.is_complex or not (source.is_floating_point or source.is_complex)
