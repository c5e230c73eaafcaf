"""The data types of sharding rules: a rule is a pure function from one call of one operator to its factors.

A *factor* is one loop of the operator's mathematics, as in Shardy: matrix multiplication has three, `i k, k j -> i j`.
A rule says which factors make up each dim of each operand and result; `spmd.rules.strategy` derives the possible
placements from them, in the same way for all rules.
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
"""For each dim of a tensor, the factors whose product it is, major first; `()` for a dim that cannot be sharded."""


Axes: TypeAlias = tuple[str, ...]
"""The mesh axes that a local implementation's operands or results are sharded over, major first."""

Body: TypeAlias = Callable[..., Any]
"""A local implementation, `body(axes, call, *args, **kwargs)`: one rank's results, computed from its local tensors with
the public collectives over the mesh axes `axes`. The tensors and the size argument in `args` are local. `call` is the
unsharded call, except that its `results` have the shapes of this rank's results. The return value has the structure of
the operator's."""


@attrs.frozen
class Row:
    """One strategy that is given explicitly: a placement, over physical dims, for every tensor operand and result.

    Without a `body`, the local implementation, the operator itself runs on the local tensors.
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
        reduce: factors over which results are reduced, and how: a result that lacks a sharded one is Partial.
        replicate: factors along which the operator cannot be sharded.
        additive: positions of operands that are added to a reduced product, such as `addmm`'s bias: where a reduced
            factor that they lack is sharded, they must be Partial too.
        bodies: by factor, the local implementation where it is sharded, for factors along which the operator cannot
            just run on shards. It does not depend on the position of the shard.
        independent: factors that some results lack because they do not depend on anything along them.
        rows: strategies that do not follow from factors: linearity (Partial in, Partial out) and local implementations
            for certain dims.
        separate: whether operands are sharded independently of each other: each combination of their placements is a
            strategy.
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
    separate: bool = False


@attrs.frozen
class Rule:
    """The sharding rule of an operator.

    Args:
        factorize: from a call to its factors.
        size_argument: position of the argument that is the result's shape (`view`, `expand`, `full`): lowering replaces
            it by the local shape.
        empty: for an operator that fails on empty operands, the local implementation that replaces it on a rank where
            an operand has no elements. It is called with `axes=()`.
        local: for an operator of canonical programs that no rank calls, the local implementation that replaces it where
            a strategy has none. It is called with `axes=()`.
    """

    factorize: Callable[[Call], Factors]
    size_argument: int | None = None
    empty: Body | None = None
    local: Body | None = None


Table: TypeAlias = Mapping[torch._ops.OpOverload, Rule]
"""The rules of several operators."""


def table(rows: Mapping[str, Rule]) -> Table:
    """A table from names of aten operators: `"mm"` is `aten.mm.default`, `"sum sum.dim_IntList"` are two operators.

    `"cholesky?"` is left out if this version of torch has no such operator.

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
