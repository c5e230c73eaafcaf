"""The pool: every operator that a program may be made of, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from spmd.testing.fuzz.pool import (
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
from spmd.testing.fuzz.pool.operator import Operator

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
"""Everything that a line of a program may do, by name."""

_OFTEN = dict.fromkeys([*pending.OPERATORS, *steered.OPERATORS], 2) | dict.fromkeys(steered.OF_TWO_AXES, 6)

WEIGHTS: Mapping[str, int] = MappingProxyType({name: _OFTEN.get(name, 1) for name in OPERATORS})
"""How often each is drawn: those that place values show an error only where the plan makes use of it."""
