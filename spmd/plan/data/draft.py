"""A plan in progress: the decisions about the mesh axes that are planned so far, and what the search knows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType

import attrs
import torch

from spmd.core.mesh import Mesh
from spmd.core.placement import Partial, Shard
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import PIN, REDISTRIBUTE, RELABEL
from spmd.plan.data.assignment import Assignment, States, flat_shape
from spmd.rules.strategy import LogicalShape, Strategy

SAME_TENSOR = (PIN, REDISTRIBUTE, RELABEL, torch.ops.aten._to_copy.default)
"""The operators, besides views, whose result has the elements of its operand, perhaps resharded or in another dtype."""


@attrs.frozen(eq=False)
class Counts:
    """The numbers of what stands for several of its kind in a program, as one layer for several equal ones.

    Args:
        made: how often a value is made, where not once.
        moved: how often it is resharded, where not once: what a layer hands to the next is not, for the last.
        ties: values that have the same placements.
    """

    made: Mapping[Value, int] = MappingProxyType({})
    moved: Mapping[Value, int] = MappingProxyType({})
    ties: tuple[tuple[Value, Value], ...] = ()

    def runs(self, operation: Operation) -> int:
        """How often an operation stands in the program."""
        return self.made.get(operation.tensors[0], 1) if self.made and operation.tensors else 1


ONCE = Counts()
"""Of a program in which everything stands for itself."""


@attrs.frozen(eq=False)
class Draft(Assignment):
    """An assignment in progress, and what the search knows of the program.

    Args:
        options: the strategies on one mesh axis of every operation that has a rule.
        given: the specs (over logical shapes) of inputs and constants.
        ends: for the result of each `enter` and `leave`, the spec (over the logical shape) of the global value along
            the mesh axes of the manual region.
        never_gathered: for some inputs, the mesh axes along which they are never gathered.
        independent: values that depend on no input; they are replicated.
        gap: the largest relative distance of any axis's cost from its optimum (0.01 is 1%); 0 if every axis was
            searched exactly.
        gather_seconds: as in `Request`.
        counts: what stands for several of its kind.
    """

    options: Mapping[Operation, tuple[Strategy, ...]]
    given: Mapping[Value, DTensorSpec]
    ends: Mapping[Value, DTensorSpec]
    never_gathered: Mapping[Value, frozenset[str]]
    independent: frozenset[Value]
    gap: float
    gather_seconds: float = math.inf
    counts: Counts = ONCE

    def never_gathered_values(self, axis: str) -> frozenset[Value]:
        """The values that are never gathered along an axis."""
        return same_tensors(self.graph, (value for value, axes in self.never_gathered.items() if axis in axes))

    def spec(self, value: Value) -> DTensorSpec:
        """The spec of a value over its logical shape."""
        return spec_of(self.mesh, self.states.get(value, {}), logical_meta(value.meta, self.logical[value]))

    def specs(self) -> dict[Value, DTensorSpec]:
        """The spec of every value: the given one if there is one, which also orders the mesh axes that share a dim."""
        specs = dict(self.given)
        known: dict[Hashable, DTensorSpec] = {}  # many values have the same spec: it is built once
        for operation in self.graph.operations:
            given = self.pinned.get(operation)
            for value in operation.tensors:
                key = (tuple(self.states.get(value, {}).items()), value.meta, self.logical[value])
                specs[value] = given[1] if given else known.get(key) or known.setdefault(key, self.spec(value))
        return specs


def same_tensors(graph: Graph, values: Iterable[Value]) -> frozenset[Value]:
    """Some values, and their results of views and `SAME_TENSOR` operators."""
    kept = set(values)
    for operation in graph.operations if kept else ():
        if operation.is_view or operation.op in SAME_TENSOR:
            kept.update(result for result in operation.tensors if operation.operands[0] in kept)
    return frozenset(kept)


def logical_meta(meta: TensorMeta, logical: LogicalShape) -> TensorMeta:
    """The meta of a tensor over its logical shape."""
    return TensorMeta(flat_shape(logical), meta.dtype)


def physical_shape(meta: TensorMeta) -> LogicalShape:
    """The logical shape of a tensor whose dims are not refined: one atom for each dim."""
    return tuple((size,) for size in meta.shape)


def spec_of(mesh: Mesh, states: States, meta: TensorMeta) -> DTensorSpec:
    """The spec with the placements `states`; mesh axes that share a dim are in the order of `states`, major first."""
    dims = tuple(tuple(axis for axis, state in states.items() if state == Shard(dim)) for dim in range(meta.ndim))
    partial = {axis: state.op for axis, state in states.items() if isinstance(state, Partial)}
    return DTensorSpec(mesh, dims, partial, meta)
