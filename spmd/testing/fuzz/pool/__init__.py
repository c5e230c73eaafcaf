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
    views,
)

OPERATORS: Mapping[str, Operator] = MappingProxyType(
    {name: operator for family in FAMILIES for name, operator in family.OPERATORS.items()}
)
"""Everything that a line of a program may do, by name."""
