"""Loops and branches: what passes their bounds keeps its sharding, and a predicate is the same on all ranks."""

from __future__ import annotations

from spmd.ir.regions import BOUNDS, CARRY, GIVE, ITEM, LOOP, MERGE, NEXT, STACK, WHILE
from spmd.rules.builders import everywhere, pointwise
from spmd.rules.notation import factors
from spmd.rules.partial import carry
from spmd.rules.rule import Table

REGIONS: Table = {
    **dict.fromkeys(BOUNDS, everywhere("*")),
    LOOP: factors(" -> "),
    WHILE: factors(" -> "),
    CARRY: pointwise(carry("init")),
    NEXT: pointwise(carry("new carry")),
    ITEM: factors("_ ..., -> ...", carry("xs")),
    STACK: factors("..., -> _ ...", carry("y")),
    GIVE: pointwise(carry("x")),
    MERGE: pointwise(carry("x y")),
}
"""The operators that bound regions of a program, and those of values that pass the bounds."""
