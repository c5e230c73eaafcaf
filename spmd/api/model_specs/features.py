"""The features of a model: the dims of its weights and activations that are one dim, found in the traced program.

Operators relate dims of their operands and results: the columns of a weight are the features that a linear layer
produces, elementwise operators keep them, and the rows of the next weight are summed over them. A *feature* is a class
of related atoms (`spmd.plan.search.atoms`): the hidden units of an MLP, the heads of an attention layer, the
vocabulary, the residual stream. Tensor parallelism shards features, each with all of its atoms.

This is how named dims work (https://arxiv.org/abs/1811.02084, Mesh TensorFlow), with names that are found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from spmd.core.placement import Partial, Placement, Shard
from spmd.ir.graph import Graph, Operation, Value
from spmd.rules.strategy import LogicalShape, Strategy

Atom: TypeAlias = tuple[Value, int]
"""A value of the program, and the position of one of its atoms among all of them."""


@attrs.frozen
class WeightAtom:
    """An atom of a weight: the position of the weight among the inputs, its dim, and the atom's place in the dim."""

    input: int
    dim: int
    place: int


@attrs.frozen(eq=False)
class Feature:
    """A class of atoms that are sharded together.

    Args:
        atoms: its atoms, in program order.
        size: the size of each atom.
        parts: its atoms in weights.
        summed: the operations that sum over it, so that ranks add their results, or that look rows up along it.
        obstacle: why it cannot be sharded without more communication than that; empty if it can.
    """

    atoms: tuple[Atom, ...]
    size: int
    parts: tuple[WeightAtom, ...]
    summed: tuple[Operation, ...]
    obstacle: str

    @property
    def values(self) -> frozenset[Value]:
        """The values that have it."""
        return frozenset(value for value, _ in self.atoms)


def find_features(
    graph: Graph,
    logical: Mapping[Value, LogicalShape],
    strategies: Mapping[Operation, Sequence[Strategy]],
    weights: int,
) -> list[Feature]:
    """The features of a program that weights have, in the order of their first atoms.

    Args:
        graph: the program; the first inputs are weights, the others what the model is called with.
        logical: the atoms of every value.
        strategies: those of each operation that has a rule, on one mesh axis.
        weights: the number of weights.
    """
    classes = _Classes(logical)
    for operation in graph.operations:
        for strategy in strategies.get(operation, ()):
            if strategy.label != "separate":
                classes.unite(list(_sharded(operation, strategy)))
    reader = _FeatureReader(graph, strategies, weights)
    found = (reader.feature(atoms, logical) for atoms in classes.members())
    return [feature for feature in found if feature.parts]


def _sharded(operation: Operation, strategy: Strategy) -> Iterator[Atom]:
    """The atoms that a strategy shards."""
    tensors, placements = (*operation.operands, *operation.tensors), (*strategy.operands, *strategy.results)
    for value, placement in zip(tensors, placements, strict=True):
        if isinstance(placement, Shard):
            yield value, placement.dim


class _Classes:
    """A partition of atoms into classes that are united, without those of a single element, which nothing shards."""

    def __init__(self, logical: Mapping[Value, LogicalShape]) -> None:
        self.parent = {
            (value, position): (value, position)
            for value, shape in logical.items()
            for position, size in enumerate(size for dim in shape for size in dim)
            if size > 1
        }

    def root(self, atom: Atom) -> Atom:
        while self.parent[atom] != atom:
            self.parent[atom] = atom = self.parent[self.parent[atom]]
        return atom

    def unite(self, atoms: Sequence[Atom]) -> None:
        known = [atom for atom in atoms if atom in self.parent]
        for atom in known[1:]:
            self.parent[self.root(atom)] = self.root(known[0])

    def members(self) -> list[tuple[Atom, ...]]:
        found: dict[Atom, list[Atom]] = {}
        for atom in self.parent:
            found.setdefault(self.root(atom), []).append(atom)
        return [tuple(atoms) for atoms in found.values()]


class _FeatureReader:
    """Reads from the operations of a program what sharding a class of atoms requires."""

    def __init__(self, graph: Graph, strategies: Mapping[Operation, Sequence[Strategy]], weights: int) -> None:
        self.strategies = strategies
        self.weights = {value: number for number, value in enumerate(graph.inputs[:weights])}
        self.arguments = frozenset(graph.inputs[weights:])
        self.active = set(self.arguments)
        self.consumers = graph.consumers
        for operation in graph.operations:
            if not self.active.isdisjoint(operation.operands):
                self.active.update(operation.tensors)
        self.order = {operation: number for number, operation in enumerate(graph.operations)}

    def feature(self, atoms: Sequence[Atom], logical: Mapping[Value, LogicalShape]) -> Feature:
        parts = tuple(_part(self.weights[value], logical[value], at) for value, at in atoms if value in self.weights)
        held = dict(atoms)
        value, position = atoms[0]
        size = [size for dim in logical[value] for size in dim][position]
        consumers = {consumer: None for value in held for consumer in self.consumers.get(value, ())} if parts else {}
        summed, obstacle = [], ""
        if len(held) < len(atoms):
            obstacle = "is twice in one tensor"
        elif not self.arguments.isdisjoint(held):
            obstacle = "is a dim of an argument"
        elif not consumers:
            obstacle = "is not used"
        elif any(part.place for part in parts):
            obstacle = "is not the major part of its dim"
        for operation in sorted(consumers, key=self.order.__getitem__):
            if obstacle:
                break
            obstacle, sums = self._consume(operation, held)
            summed += [operation] if sums else []
        return Feature(tuple(atoms), size, parts, tuple(summed), obstacle)

    def _consume(self, operation: Operation, held: Mapping[Value, int]) -> tuple[str, bool]:
        """Why an operation cannot take operands with a sharded feature, and whether it sums over it."""
        strategy = next((s for s in self.strategies.get(operation, ()) if _fits(operation, s, held)), None)
        where = f"{operation.name} at {operation.source}"
        if strategy is None:
            return f"is needed whole by {where}", False
        passes = strategy.body is None and not any(isinstance(result, Partial) for result in strategy.results)
        if passes:
            return "", False
        sharded = [value for value in operation.operands if value in held]
        by_weight = any(value not in self.active for value in sharded)
        by_activation = any(value in self.active for value in sharded)
        if strategy.body is None and by_weight and by_activation:
            return "", True
        if strategy.body is None or by_activation:
            return f"is reduced by {where}", False
        if self.active.isdisjoint(operation.operands):
            return f"is looked up by fixed indices by {where}", False
        return "", True  # a table, whose rows the arguments choose


def _fits(operation: Operation, strategy: Strategy, held: Mapping[Value, int]) -> bool:
    """Whether a strategy shards the atoms of a feature in all operands that have it, and nothing else."""

    def is_held(value: Value, placement: Placement) -> bool:
        position = placement.dim if isinstance(placement, Shard) else None
        return held.get(value) == position

    return all(map(is_held, operation.operands, strategy.operands)) and strategy.label != "replicate"


def _part(number: int, shape: LogicalShape, position: int) -> WeightAtom:
    for dim, sizes in enumerate(shape):
        if position < len(sizes):
            return WeightAtom(number, dim, position)
        position -= len(sizes)
    raise AssertionError("an atom that its value lacks")
