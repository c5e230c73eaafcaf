"""Decisions about a program, on which its price depends: placements of values and strategies of operations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache

import attrs
import torch

from spmd.core.mesh import Mesh
from spmd.core.placement import Placement, Shard
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.rules.strategy import LogicalShape, Strategy

States = Mapping[str, Placement]
"""The placement of a value on the planned mesh axes, in planning order; on missing axes it is replicated.

Dims are logical: one for each atom.
"""


@attrs.frozen(eq=False)
class Assignment:
    """A program, and the decisions about it that its cost depends on; those of a plan are complete.

    Args:
        mesh: the mesh.
        graph: the program, with the redistributions of planned axes as explicit operations.
        logical: the atoms of every dim of every value.
        pinned: operations whose operand and result specs (over logical shapes) are given: constraints, outputs, and the
            changes of layout at inputs and outputs.
        states: the placement of every value on the planned axes.
        strategies: the strategy of every operation on the planned axes.
        planned: the axes planned so far, in planning order.
        fused: values without memory traffic, because a compiler would fuse their producers and consumers.
        copied: results of views that are copies.
        latency_shares: for values whose collectives are sent together with others, the part of a launch's latency that
            each pays.
        reduce_dtype: the dtype in which sums over ranks run, as in `Request`.
    """

    mesh: Mesh
    graph: Graph
    logical: Mapping[Value, LogicalShape]
    pinned: Mapping[Operation, tuple[DTensorSpec, DTensorSpec]]
    states: Mapping[Value, States]
    strategies: Mapping[Operation, Mapping[str, Strategy]]
    planned: tuple[str, ...]
    fused: frozenset[Value]
    copied: frozenset[Value]
    latency_shares: Mapping[Value, float]
    reduce_dtype: torch.dtype | None

    def local_sizes(self, value: Value) -> tuple[int, ...]:
        """The logical shape of a value's largest shard, with its placements on the axes planned so far."""
        return self.sizes_at(value, self.states.get(value, {}))

    def sizes_at(self, value: Value, states: States) -> tuple[int, ...]:
        """The logical shape of a value's largest shard, with the placements `states`."""
        sizes = flat_shape(self.logical[value])
        for axis, state in states.items():
            sizes = shrink(sizes, state, self.mesh.axis_size(axis))
        return sizes


@lru_cache(maxsize=4096)
def flat_shape(logical: LogicalShape) -> tuple[int, ...]:
    """The logical shape as one tuple of atoms."""
    return tuple(itertools.chain.from_iterable(logical))


def shrink(sizes: tuple[int, ...], state: Placement, count: int) -> tuple[int, ...]:
    """The sizes of the largest shard after placement `state` on one more mesh axis, of `count` ranks."""
    if not isinstance(state, Shard):
        return sizes
    return (*sizes[: state.dim], -(-sizes[state.dim] // count), *sizes[state.dim + 1 :])
