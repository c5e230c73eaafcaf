"""Atoms: the common refinement of all dims that the program's operators relate.

An *atom* is one part of a dim: the length of every dim is the product of its atoms, major first, and each atom can be
sharded on its own.

`F.linear` on `[b, s, d]` traces to `view([b * s, d]), mm, view`. So that a plan can shard `s` through all three, every
dim is split at *breakpoints*, the products of its inner atoms: `b * s` gets the breakpoint `s`. Breakpoints propagate
between dims that share a factor until none is added. A breakpoint is added only if the breakpoints of the dim still
form a divisibility chain; otherwise the operator cannot shard that dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.rules.rule import Factors
from spmd.rules.strategy import Atoms, LogicalShape


@attrs.frozen(eq=False)
class Refinement:
    """The atoms of every dim of every value, and of every factor of every operation that has factors."""

    values: Mapping[Value, LogicalShape]
    factors: Mapping[Operation, Atoms]


class _Breakpoints:
    """The breakpoints of one dim or factor of length `size`: products of inner atoms, strictly between 1 and `size`."""

    __slots__ = ("points", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.points: set[int] = set()

    def add(self, point: int) -> bool:
        """Add a breakpoint if the divisibility chain allows it; returns whether it was added."""
        if not 1 < point < self.size or point in self.points or self.size % point:
            return False
        if any(point % other and other % point for other in self.points):
            return False
        self.points.add(point)
        return True

    def atoms(self) -> tuple[int, ...]:
        """The sizes of the atoms, major first."""
        cuts = [1, *sorted(self.points), self.size]
        return tuple(outer // inner for inner, outer in itertools.pairwise(cuts))[::-1]


def refine(graph: Graph, factors: Mapping[Operation, Factors]) -> Refinement:
    """Refine the dims of all values of a graph into atoms.

    Args:
        graph: the program.
        factors: the factors of every operation that has a rule; other operations relate no dims.
    """
    values = {value: tuple(map(_Breakpoints, value.meta.shape)) for value in _values(graph)}
    parts = {
        operation: {name: _Breakpoints(size) for name, size in factors[operation].sizes.items()}
        for operation in graph.operations
        if operation in factors
    }
    links = [
        link
        for operation in graph.operations
        if operation in factors
        for link in _links(operation, factors[operation], values, parts[operation])
    ]
    while any([link.unite() for link in links] + [link.unite() for link in reversed(links)]):
        pass
    return Refinement(
        {value: tuple(dim.atoms() for dim in dims) for value, dims in values.items()},
        {operation: {name: part.atoms() for name, part in found.items()} for operation, found in parts.items()},
    )


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.inputs
    for value, _ in graph.constants:
        yield value
    for operation in graph.operations:
        yield from operation.tensors


class _Link:
    """One dim of a value, and one of the operation's factors in it; `inner` is the product of the factors inside it."""

    __slots__ = ("dim", "factor", "inner", "seen")

    def __init__(self, dim: _Breakpoints, factor: _Breakpoints, inner: int) -> None:
        self.dim, self.factor, self.inner = dim, factor, inner
        self.seen = (-1, -1)
        """How many breakpoints both had when they were united."""

    def unite(self) -> bool:
        """Propagate breakpoints between the dim and the factor; returns whether any was added."""
        dim, factor, inner = self.dim, self.factor, self.inner
        if self.seen == (len(dim.points), len(factor.points)):
            return False
        outer = inner * factor.size
        changed = dim.add(inner) | dim.add(outer)
        for point in sorted(dim.points):
            if inner < point < outer and point % inner == 0:
                changed |= factor.add(point // inner)
        for point in sorted(factor.points):
            changed |= dim.add(point * inner)
        self.seen = len(dim.points), len(factor.points)
        return changed


def _links(
    operation: Operation,
    factors: Factors,
    values: Mapping[Value, tuple[_Breakpoints, ...]],
    parts: Mapping[str, _Breakpoints],
) -> Iterator[_Link]:
    tensors = (*operation.operands, *operation.tensors)
    for value, dims in zip(tensors, (*factors.operands, *factors.results), strict=True):
        for names, breakpoints in zip(dims, values[value], strict=True):
            inner = 1
            for name in reversed(names):
                yield _Link(breakpoints, parts[name], inner)
                inner *= parts[name].size
