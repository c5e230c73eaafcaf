"""A plan in progress: the program, and the decisions about the mesh axes that are planned so far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from functools import lru_cache

import attrs
import torch

from spmd.core.mesh import Mesh
from spmd.core.placement import Partial, Placement, Shard
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import PIN, REDISTRIBUTE, RELABEL
from spmd.rules.strategy import LogicalShape, Strategy

SAME_TENSOR = (PIN, REDISTRIBUTE, RELABEL, torch.ops.aten._to_copy.default)
"""The operators, besides views, whose result has the elements of its operand, perhaps resharded or in another dtype."""

States = Mapping[str, Placement]
"""The placement of a value on the planned mesh axes, in planning order; on missing axes it is replicated.

Dims are logical: one for each atom.
"""


@attrs.frozen(eq=False)
class Draft:
    """The program, and what is decided about it so far.

    Args:
        mesh: the mesh.
        graph: the program, with the redistributions of planned axes as explicit operations.
        logical: the atoms of every dim of every value.
        options: the strategies on one mesh axis of every operation that has a rule.
        pinned: operations whose operand and result specs (over logical shapes) are given: constraints, outputs, and the
            changes of layout at inputs and outputs.
        given: the specs (over logical shapes) of inputs and constants.
        states: the placement of every value on the planned axes.
        strategies: the strategy of every operation on the planned axes.
        planned: the axes planned so far, in planning order.
        ends: for the result of each `enter` and `leave`, the spec (over the logical shape) of the global value along
            the mesh axes of the manual region.
        never_gathered: for some inputs, the mesh axes along which they are never gathered.
        fused: values without memory traffic, because a compiler would fuse their producers and consumers.
        copied: results of views that are copies.
        latency_shares: for values whose collectives are sent together with others, the part of a launch's latency that
            each pays.
        independent: values that depend on no input; they are replicated.
        reduce_dtype: the dtype in which sums over ranks run, as in `Request`.
        gap: the largest relative distance of any axis's cost from its optimum (0.01 is 1%); 0 if every axis was
            searched exactly.
        gather_seconds: as in `Request`.
    """

    mesh: Mesh
    graph: Graph
    logical: Mapping[Value, LogicalShape]
    options: Mapping[Operation, tuple[Strategy, ...]]
    pinned: Mapping[Operation, tuple[DTensorSpec, DTensorSpec]]
    given: Mapping[Value, DTensorSpec]
    states: Mapping[Value, States]
    strategies: Mapping[Operation, Mapping[str, Strategy]]
    planned: tuple[str, ...]
    ends: Mapping[Value, DTensorSpec]
    never_gathered: Mapping[Value, frozenset[str]]
    fused: frozenset[Value]
    copied: frozenset[Value]
    latency_shares: Mapping[Value, float]
    independent: frozenset[Value]
    reduce_dtype: torch.dtype | None
    gap: float
    gather_seconds: float = math.inf

    def never_gathered_values(self, axis: str) -> frozenset[Value]:
        """The inputs that are never gathered along `axis`, and their results of views and `SAME_TENSOR` operators."""
        kept = {value for value, axes in self.never_gathered.items() if axis in axes}
        for operation in self.graph.operations if kept else ():
            if operation.is_view or operation.op in SAME_TENSOR:
                kept.update(result for result in operation.tensors if operation.operands[0] in kept)
        return frozenset(kept)

    def local_sizes(self, value: Value) -> tuple[int, ...]:
        """The logical shape of a value's largest shard, with its placements on the axes planned so far."""
        return self.sizes_at(value, self.states.get(value, {}))

    def sizes_at(self, value: Value, states: States) -> tuple[int, ...]:
        """The logical shape of a value's largest shard, with the placements `states`."""
        sizes = flat_shape(self.logical[value])
        for axis, state in states.items():
            sizes = shrink(sizes, state, self.mesh.axis_size(axis))
        return sizes

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


@lru_cache(maxsize=4096)
def flat_shape(logical: LogicalShape) -> tuple[int, ...]:
    """The logical shape as one tuple of atoms."""
    return tuple(itertools.chain.from_iterable(logical))


def logical_meta(meta: TensorMeta, logical: LogicalShape) -> TensorMeta:
    """The meta of a tensor over its logical shape."""
    return TensorMeta(flat_shape(logical), meta.dtype)


def physical_shape(meta: TensorMeta) -> LogicalShape:
    """The logical shape of a tensor whose dims are not refined: one atom for each dim."""
    return tuple((size,) for size in meta.shape)


def shrink(sizes: tuple[int, ...], state: Placement, count: int) -> tuple[int, ...]:
    """The sizes of the largest shard after placement `state` on one more mesh axis, of `count` ranks."""
    if not isinstance(state, Shard):
        return sizes
    return (*sizes[: state.dim], -(-sizes[state.dim] // count), *sizes[state.dim + 1 :])


def spec_of(mesh: Mesh, states: States, meta: TensorMeta) -> DTensorSpec:
    """The spec with the placements `states`; mesh axes that share a dim are in the order of `states`, major first."""
    dims = tuple(tuple(axis for axis, state in states.items() if state == Shard(dim)) for dim in range(meta.ndim))
    partial = {axis: state.op for axis, state in states.items() if isinstance(state, Partial)}
    return DTensorSpec(mesh, dims, partial, meta)
