"""Predicted times: of one rank's share of an operation, and of resharding a value along one mesh axis."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch

from spmd.collectives.precision import summed_in
from spmd.collectives.primitive import Collective
from spmd.collectives.primitives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.ir.dataflow import is_read_by_items
from spmd.ir.effects import Effect
from spmd.ir.graph import Operation, Value
from spmd.ir.list_operators import FUSED
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import BOUNDS, STACK
from spmd.plan.cost.buckets import bucketed_seconds
from spmd.plan.cost.flops import arithmetic_dtype, flops
from spmd.plan.data.assignment import Assignment, States, flat_shape, shrink
from spmd.plan.local.calls import local_collectives
from spmd.plan.machine.machine import Machine
from spmd.plan.machine.transcendentals import evaluations
from spmd.rules.strategy import Strategy


@attrs.frozen(eq=False)
class LocalCost:
    """Roofline times of the operations of one assignment, for the rank with the largest shards.

    Args:
        machine: the cost constants.
        assignment: the program, and what is decided.
        states: the placements of all values on the axes planned so far, and the guessed ones on later axes.
        sizes: the local logical shapes of all values with these placements.
        flops: the floating-point operations of every operation on one rank with these placements.
    """

    machine: Machine
    assignment: Assignment
    states: Mapping[Value, States]
    sizes: Mapping[Value, tuple[int, ...]]
    flops: Mapping[Operation, float]

    @classmethod
    def of(cls, machine: Machine, assignment: Assignment, preview: Mapping[Value, States] | None = None) -> LocalCost:
        """The costs of an assignment.

        Args:
            machine: the cost constants.
            assignment: the program, and what is decided.
            preview: guessed placements of values on axes that are planned later.
        """
        preview = preview or {}
        values = (*assignment.graph.inputs, *(value for value, _ in assignment.graph.constants))
        values += tuple(value for operation in assignment.graph.operations for value in operation.tensors)
        states: Mapping[Value, States] = assignment.states
        if preview:
            states = {value: {**assignment.states.get(value, {}), **preview.get(value, {})} for value in values}
        work = {operation: flops(operation) for operation in assignment.graph.operations}
        return cls(
            machine,
            assignment,
            states,
            {value: assignment.sizes_at(value, states.get(value, {})) for value in values},
            {
                operation: amount * _share(assignment, operation, preview) if amount else 0.0
                for operation, amount in work.items()
            },
        )

    def cache_key(self, operation: Operation) -> Hashable:
        """A cache key: operations with equal keys take equal times with the same strategies."""
        values = (*operation.operands, *operation.tensors)
        if operation.op is REDISTRIBUTE and operation not in self.assignment.pinned:
            states = tuple(tuple(self.states.get(value, {}).items()) for value in values)
            share = self.assignment.latency_shares.get(values[0])
            return self.assignment.logical[values[0]], values[0].meta.dtype, states, share
        if self._is_free(operation):
            return None
        shares = tuple((self.sizes[value], value.meta.dtype, value in self.assignment.fused) for value in values)
        return operation.op, self.flops[operation], self._evaluations(operation), shares

    def seconds(self, operation: Operation, strategy: Strategy, axis: str) -> float:
        """Seconds of an operation with `strategy` on one more mesh axis.

        Includes the collectives of a local implementation and those of a redistribution along planned axes. Reshards
        along `axis` itself are priced by `MoveCost`.
        """
        if operation.op is REDISTRIBUTE and operation not in self.assignment.pinned:
            return self._redistribution_seconds(operation, strategy, axis)
        if self._is_free(operation):
            return 0.0
        sizes, share = [], 1.0
        count = self.assignment.mesh.axis_size(axis)
        states = (*strategy.operands, *strategy.results)
        for value, state in zip((*operation.operands, *operation.tensors), states, strict=True):
            before = self.sizes[value]
            after = shrink(before, state, count)
            if isinstance(state, Shard) and before[state.dim]:
                share = after[state.dim] / before[state.dim]
            sizes.append(after)
        traffic = self._traffic(operation, sizes)
        work = self.flops[operation] * share
        evaluated = self._evaluations(operation, strategy.results, count)
        seconds = self.machine.compute_seconds(work, traffic, arithmetic_dtype(operation), evaluated)
        return seconds + self.machine.operator_latency + self._body_seconds(operation, strategy, axis)

    def planned_seconds(self, operation: Operation) -> float:
        """Seconds of an operation with its strategies on the axes planned so far, without its collectives."""
        if self._is_free(operation):
            return 0.0
        traffic = self._traffic(operation, [self.sizes[value] for value in (*operation.operands, *operation.tensors)])
        work, evaluated = self.flops[operation], self._evaluations(operation)
        seconds = self.machine.compute_seconds(work, traffic, arithmetic_dtype(operation), evaluated)
        return seconds + self.machine.operator_latency

    def _traffic(self, operation: Operation, sizes: Sequence[Sequence[int]]) -> float:
        """Bytes that pass between memory and compute units, for operands and results of these sizes."""
        values = (*operation.operands, *operation.tensors)
        if operation.op is STACK:  # each trip writes its part; its number is none of memory
            values, sizes = (values[0], values[-1]), (sizes[0], sizes[0])
        nbytes = [
            0 if value in self.assignment.fused else math.prod(size) * value.meta.dtype.itemsize
            for value, size in zip(values, sizes, strict=True)
        ]
        count = len(values) - len(operation.tensors)
        read, written = sum(nbytes[:count]), sum(nbytes[count:])
        return read + written if operation.op in FUSED else self.machine.traffic(read, written)

    def _redistribution_seconds(self, operation: Operation, strategy: Strategy, axis: str) -> float:
        """Seconds of a redistribution along planned axes, of the shard that `strategy` leaves on one more axis."""
        (operand,), (result,), mesh = operation.operands, operation.tensors, self.assignment.mesh
        seconds = 0.0
        for moved in self.assignment.planned:
            before, after = (self.states.get(value, {}).get(moved, Replicate()) for value in (operand, result))
            if before != after:
                others = {a: state for a, state in self.states.get(operand, {}).items() if a not in (moved, axis)}
                sizes = shrink(self.assignment.sizes_at(operand, others), strategy.operands[0], mesh.axis_size(axis))
                dtypes = operand.meta.dtype, self.assignment.reduce_dtype
                share = self.assignment.latency_shares.get(operand, 1.0)
                cost = MoveCost(self.machine, moved, mesh.axis_size(moved), sizes, *dtypes, latency_share=share)
                seconds += cost.seconds(before, after)
        return seconds

    def _evaluations(self, operation: Operation, results: Sequence[Placement] = (), count: int = 1) -> float:
        """Evaluations of transcendental functions; `results` are placements on one more axis, of `count` ranks."""
        each = evaluations(operation.op, operation.kwargs)
        if not each:
            return 0.0
        sizes = self.sizes[operation.tensors[0]]
        return each * math.prod(shrink(sizes, results[0], count) if results else sizes)

    def _is_free(self, operation: Operation) -> bool:
        is_view = operation.is_view and self.assignment.copied.isdisjoint(operation.tensors)
        stays_list = operation.op is STACK and is_read_by_items(self.assignment.graph, operation.tensors[0])
        is_bound = operation.op is REDISTRIBUTE or operation.op in BOUNDS
        costless = is_bound or is_view or stays_list or operation.effect is Effect.HOST
        return costless or operation in self.assignment.pinned

    def _body_seconds(self, operation: Operation, strategy: Strategy, axis: str) -> float:
        """Seconds of the collective of a manual region, or of those in the local implementation on all planned axes."""
        chosen = {**self.assignment.strategies.get(operation, {}), axis: strategy}
        found = local_collectives(self.assignment, operation, chosen)
        return sum(self.machine.collective_seconds(kind, axes, sent) for kind, axes, sent in found)


def _share(assignment: Assignment, operation: Operation, preview: Mapping[Value, States]) -> float:
    """The fraction of an operation's arithmetic on one rank, by planned axes and by the guesses for later ones."""
    share = 1.0
    values = (*operation.operands, *operation.tensors)
    sizes = [flat_shape(assignment.logical[value]) for value in values]
    for axis, strategy in assignment.strategies.get(operation, {}).items():
        states = (*strategy.operands, *strategy.results)
        after = [
            shrink(size, state, assignment.mesh.axis_size(axis)) for size, state in zip(sizes, states, strict=True)
        ]
        shares = [math.prod(new) / math.prod(old) for old, new in zip(sizes, after, strict=True) if new != old]
        share *= shares[0] if shares else 1.0
        sizes = after
    later = {axis for value in values for axis, state in preview.get(value, {}).items() if isinstance(state, Shard)}
    return share / assignment.mesh.axis_size(sorted(later))


@attrs.frozen(cache_hash=True)
class MoveCost:
    """Times of moving one tensor between placements along one mesh axis; local steps are free.

    Args:
        machine: the cost constants.
        axis: the mesh axis.
        count: the number of ranks along it.
        sizes: the logical shape of the tensor, local on the other mesh axes and global on this one.
        dtype: its dtype.
        reduce_dtype: the dtype in which sums run, as by `summed_in`.
        gather_seconds: seconds that are added to an all_gather; infinite if the tensor is never gathered.
        latency_share: the part of a launch's latency that its collectives pay.
        runs: how often it is moved on average, in a loop or a branch.
    """

    machine: Machine
    axis: str
    count: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    reduce_dtype: torch.dtype | None = None
    gather_seconds: float = 0.0
    latency_share: float = 1.0
    runs: float = 1.0

    def seconds(self, source: Placement, target: Placement) -> float:
        """Seconds to bring the tensor from one placement to another."""
        found = self.collective(source, target)
        if found is None:
            return 0.0
        collective, sent = found
        moved = collective.kind, (self.axis,), sent
        seconds = bucketed_seconds(self.machine, self.count, moved, self.latency_share)
        extra = self.gather_seconds if collective.gathers else 0.0
        return self.runs * (seconds + self._cast_seconds(source, target) + extra)

    def _cast_seconds(self, source: Placement, target: Placement) -> float:
        """Seconds of the casts before and after a sum in another dtype."""
        wide = self._sent_dtype(source)
        if wide == self.dtype:
            return 0.0
        shapes = shrink(self.sizes, source, self.count), shrink(self.sizes, target, self.count)
        narrow, summed = self.dtype.itemsize, wide.itemsize
        before, after = map(math.prod, shapes)
        read, written = before * narrow + after * summed, before * summed + after * narrow
        return self.machine.copy_seconds(read, written)

    def _sent_dtype(self, source: Placement) -> torch.dtype:
        return summed_in(self.dtype, source.op, self.reduce_dtype) if isinstance(source, Partial) else self.dtype

    def collective(self, source: Placement, target: Placement) -> tuple[Collective, float] | None:
        """The collective that a move needs and the most bytes that any rank sends in it; None if the move is local."""
        if source == target or isinstance(source, Replicate):
            return None
        arguments: tuple[Any, ...] = ()
        if isinstance(source, Partial):
            collective = REDUCE_SCATTER if isinstance(target, Shard) else ALL_REDUCE
            arguments = (source.op, target.dim) if isinstance(target, Shard) else ()
        elif isinstance(target, Shard):
            collective, arguments = ALL_TO_ALL, (target.dim, source.dim, 0, self.sizes[source.dim])
        else:
            collective, arguments = ALL_GATHER, (source.dim, self.sizes[source.dim])
        shape = shrink(self.sizes, source, self.count)
        itemsize = self._sent_dtype(source).itemsize
        return collective, collective.most_bytes_sent((self.count,), shape, itemsize, arguments)
