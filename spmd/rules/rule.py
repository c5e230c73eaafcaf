"""What a rule is: a pure function from one call of one operator to its factors.

A *factor* is one loop of the operator's mathematics, as in Shardy: matrix multiplication has three, `i k, k j -> i j`.
A rule says which factors make up each dim of each operand and result; which placements follow from that is derived
once, for all rules, in `spmd.rules.strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import attrs
import torch

from spmd.core.placement import Placement, Reduction
from spmd.errors import RuleError
from spmd.ir.call import Call

FactorDims: TypeAlias = tuple[tuple[str, ...], ...]
"""For each dim of a tensor, the factors that it is made of, major first; `()` for a dim that cannot be sharded."""


Axes: TypeAlias = tuple[str, ...]
"""The mesh axes over which a local body runs, major first."""

Body: TypeAlias = Callable[..., Any]
"""`body(axes, call, *args, **kwargs)`: what a rank computes, on its local tensors, with the public collectives over the
mesh axes `axes`. In `args` the tensors and the size argument are local. `call` is the unsharded call, but for its
`results`, which are those that this rank is to give; the result has the operator's structure."""


@attrs.frozen
class Row:
    """One strategy written out: a placement (over physical dims) for every tensor operand and every tensor result.

    Without a `body` the operator itself runs on the local tensors.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    body: Body | None = None


@attrs.frozen(eq=False)
class Factors:
    """The factors of one call.

    Args:
        operands, results: the factors of every dim of every tensor operand and result.
        sizes: the length of every factor.
        reduce: factors that results sum (or max, ...) over: where a result lacks the factor it becomes Partial.
        replicate: factors along which the operator cannot be cut.
        additive: operands (by position) that are added to a reduced product, as `addmm`'s bias: where a reduced factor
            that they lack is cut, they must be Partial themselves.
        bodies: what a rank computes where the factor is cut, for factors along which the operator alone is not enough;
            such a body does not depend on where a shard lies.
        independent: factors that some results lack because they do not depend on anything along them.
        rows: strategies that do not follow from factors: linearity (Partial in, Partial out) and local bodies.
    """

    operands: tuple[FactorDims, ...]
    results: tuple[FactorDims, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, Reduction] = attrs.field(factory=dict)
    replicate: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    bodies: Mapping[str, Body] = attrs.field(factory=dict)
    independent: frozenset[str] = frozenset()
    rows: tuple[Row, ...] = ()


@attrs.frozen
class Rule:
    """The sharding rule of an operator.

    Args:
        factorize: the factors of a call.
        size_argument: position of the argument that repeats the result's shape (`view`, `expand`, `full`): lowering
            puts the local shape there.
        empty: what a rank computes in place of the operator where one of its operands has no elements, if the operator
            fails there. It is called with no axes.
    """

    factorize: Callable[[Call], Factors]
    size_argument: int | None = None
    empty: Body | None = None


Table: TypeAlias = Mapping[torch._ops.OpOverload, Rule]
"""The rules of several operators."""


def table(rows: Mapping[str, Rule]) -> Table:
    """Rules by the names of the operators that have them: `"mm"` is `aten.mm.default`, `"sum sum.dim_IntList"` are two.

    `"cholesky?"` is an operator that not every version of torch has.

    Raises:
        RuleError: torch has no such operator.
    """
    named = ((name, rule) for names, rule in rows.items() for name in names.split())
    return MappingProxyType({operator(name.rstrip("?")): rule for name, rule in named if _is_wanted(name)})


def _is_wanted(name: str) -> bool:
    return not name.endswith("?") or _find(name.rstrip("?")) is not None


def operator(name: str) -> torch._ops.OpOverload:
    """The aten operator of a name, `"mm"` or `"sum.dim_IntList"`; RuleError if there is none."""
    found = _find(name)
    if found is None:
        raise RuleError(f"torch has no operator aten.{name}. Write 'name' or 'name.overload', with spaces between.")
    return found


def _find(name: str) -> torch._ops.OpOverload | None:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found if isinstance(found, torch._ops.OpOverload) else None
