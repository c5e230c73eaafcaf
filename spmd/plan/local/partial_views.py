"""Results of a rank that are views of parts of larger tensors, which they would keep alive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from typing import TypeVar

from spmd.ir.graph import Value

Base = TypeVar("Base")


def partial_views(
    outputs: Iterable[Value],
    base: Callable[[Value], Base],
    nbytes: Callable[[Base], int],
    kept: Container[Base],
    slices: Container[Value],
) -> dict[Base, tuple[Value, ...]]:
    """The results that together are smaller than what they are views of, by that.

    A view that the function takes of an argument stays one: the caller holds the argument.

    Args:
        outputs: the results.
        base: what holds a result's memory.
        nbytes: its bytes.
        kept: the arguments among these that the caller holds.
        slices: the results that a resharding has sliced.
    """
    found: dict[Base, list[Value]] = defaultdict(list)
    for value in dict.fromkeys(outputs):
        if base(value) not in kept or value in slices:
            found[base(value)].append(value)
    return {
        held: tuple(values)
        for held, values in found.items()
        if sum(value.meta.nbytes for value in values) < nbytes(held)
    }
