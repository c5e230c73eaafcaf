"""How Partial values flow through operators: linearity and monotonicity, declared by argument name.

Each declaration takes *groups*, strings of argument names separated by spaces. For each group there is a strategy in
which its arguments are Partial and all others replicated. `linear("self other")` is joint linearity (addition),
`linear("self", "other")` multilinearity (multiplication). With `"self:0"` only result 0 is Partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import attrs
import torch

from spmd.core.placement import Partial, Placement, Reduction, Replicate
from spmd.core.spec import TensorMeta
from spmd.core.value_types import is_continuous, is_integer
from spmd.ir.call import Call
from spmd.ir.number import Number
from spmd.rules.notation import operand_names
from spmd.rules.rule import Row

Through: TypeAlias = tuple[tuple[Reduction, Reduction | None], ...]

_SUM: Through = (("sum", "sum"),)
_UP: Through = (("max", "max"), ("min", "min"))
_DOWN: Through = (("max", "min"), ("min", "max"))


@attrs.frozen
class Flow:
    """Strategies with Partial operands: `through` maps the reduction of a group's arguments to that of the results.

    `times` names an argument whose sign decides: if it is negative, max and min of the results are exchanged; if it is
    zero, complex, a tensor or dynamic, there are no strategies. `arithmetic` says that integers may overflow: ranks
    that hold nothing of a maximum or minimum hold the least or largest integer, so integers have no strategies for
    these.
    """

    groups: tuple[str, ...]
    through: Through
    times: str | None = None
    arithmetic: bool = False

    def __call__(self, call: Call) -> Iterator[Row]:
        """The rows of one call."""
        factor = call.argument(self.times) if self.times else 1
        if isinstance(factor, (TensorMeta, complex, Number)) or not factor:
            return
        through = self.through if factor > 0 else _exchanged(self.through)
        for group in self.groups:
            words, _, results = group.partition(":")
            for source, target in through:
                if self.arithmetic and source != "sum" and _holds_integers(call, words.split()):
                    continue
                row = _row(call, words.split(), source, target, {int(index) for index in results.split()})
                if row is not None:
                    yield row


def linear(*groups: str) -> Flow:
    """Partial sums stay partial sums, through an operator that is jointly linear in the arguments of each group.

    Calls in which an argument of the group is a nonzero number have no such strategy.
    """
    return Flow(groups, _SUM)


def increasing(*groups: str, times: str | None = None, arithmetic: bool = False) -> Flow:
    """Partial max stays max, and min stays min, through an operator that is nondecreasing in a group's arguments.

    Args:
        groups: groups of argument names.
        times: the name of an argument whose sign decides: where it is negative, max becomes min and min max.
        arithmetic: whether integers may overflow.
    """
    return Flow(groups, _UP, times, arithmetic)


def decreasing(*groups: str, times: str | None = None, arithmetic: bool = False) -> Flow:
    """Partial max becomes min, and min max, through an operator that is nonincreasing in a group's arguments.

    Args:
        groups: groups of argument names.
        times: the name of an argument whose sign decides: where it is negative, max stays max and min stays min.
        arithmetic: whether integers may overflow.
    """
    return Flow(groups, _DOWN, times, arithmetic)


def carry(*groups: str) -> Flow:
    """Every Partial keeps its reduction: for operators that only move, copy or drop elements, or insert zeros."""
    return Flow(groups, _SUM + _UP)


def ignores(*groups: str) -> Flow:
    """Results depend only on the shape and dtype of these arguments: where they are Partial, results are replicated."""
    return Flow(groups, (("sum", None), ("max", None), ("min", None)))


def keeps_max(*groups: str) -> Flow:
    """Partial max stays max: for operators that compute a maximum over elements."""
    return Flow(groups, (("max", "max"),))


def keeps_min(*groups: str) -> Flow:
    """Partial min stays min: for operators that compute a minimum over elements."""
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
        infinite = [dtype.is_floating_point for dtype in dtypes]  # an empty shard contributes an infinity
        if any(infinite) and not all(_has_infinity(call.results[i].dtype) for i in results):
            return None
        if not all(_holds(call.results[i].dtype, dtype) for i in results for dtype in dtypes):
            return None
        if to_bool or any(dtype.is_complex for dtype in (*dtypes, *(call.results[i].dtype for i in results))):
            return None
    placed = Replicate() if target is None else Partial(target)
    return Row(operands, tuple(placed if i in results else Replicate() for i in range(len(call.results))))


def _holds_integers(call: Call, group: list[str]) -> bool:
    named = zip(operand_names(call), call.operands, strict=True)
    return any(name in group and is_integer(meta.dtype) for name, meta in named)


def _holds(target: torch.dtype, source: torch.dtype) -> bool:
    """Whether a conversion between integers wraps none around; true for all other dtypes."""
    if not (is_integer(target) and is_integer(source)):
        return True
    held, given = torch.iinfo(target), torch.iinfo(source)
    return held.min <= given.min and given.max <= held.max


def _has_infinity(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and "fn" not in str(dtype)  # float8_e4m3fn has finite numbers and nan


def _keeps_sums(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether conversion between these dtypes commutes with summation (up to rounding of floats)."""
    if torch.bool in (source, target):
        return False
    return is_continuous(target) or not is_continuous(source)
