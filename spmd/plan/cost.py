"""Predicted times: of an operation's share on one rank, and of moving a value between placements on one axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import attrs
import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from spmd.collectives.traffic import StepKind, ring_bytes
from spmd.graph import Graph, Operation, Value, map_leaves
from spmd.placement import Partial, Placement, Replicate, Shard
from spmd.plan.bodies import body_collectives
from spmd.plan.draft import Draft, flat_shape, shrink
from spmd.plan.machine import Machine
from spmd.plan.markers import REDISTRIBUTE
from spmd.rules.strategy import Strategy
from spmd.spec import TensorMeta

_ATTENTION_FLOPS = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v)
    ),
}
"""Formulas that torch's registry lacks."""


def flops(operation: Operation) -> float:
    """Floating-point operations of the unsharded operator; 0 where memory traffic is all that counts."""
    packet = operation.op.overloadpacket
    formula = _ATTENTION_FLOPS.get(packet.__name__) or flop_registry.get(packet)
    if formula is None:
        return 0.0
    call = operation.call()
    shapes = map_leaves(lambda leaf: leaf.shape if isinstance(leaf, TensorMeta) else leaf, call.args)
    return float(formula(*shapes, out_val=call.results[0].shape))


def is_view(operation: Operation) -> bool:
    """Whether an operation only renames the elements of its argument."""
    return any(argument.alias_info is not None for argument in operation.op._schema.arguments)


def is_pointwise(operation: Operation) -> bool:
    """Whether a compiler would fuse an operation with its neighbours."""
    return torch.Tag.pointwise in operation.op.tags or not operation.operands


def fused_values(graph: Graph) -> frozenset[Value]:
    """The values that a compiler would keep out of memory: all their producers and consumers are pointwise.

    A view is its argument: it has no traffic of its own.
    """
    root: dict[Value, Value] = {}
    inner: dict[Value, bool] = {}
    for value in (*graph.inputs, *(value for value, _ in graph.constants)):
        inner[value] = False
    for operation in graph.operations:
        if operation.op is REDISTRIBUTE or is_view(operation):
            for value in operation.tensors:
                root[value] = root.get(operation.operands[0], operation.operands[0])
            continue
        pointwise = is_pointwise(operation)
        for value in operation.tensors:
            inner[value] = pointwise
        if not pointwise:
            for value in operation.operands:
                inner[root.get(value, value)] = False
    for value in graph.outputs:
        inner[root.get(value, value)] = False
    return frozenset(value for value in (*inner, *root) if inner[root.get(value, value)])


@attrs.frozen(eq=False)
class LocalCost:
    """Roofline times of the operations of one draft, as one rank runs them.

    Args:
        machine: the machine.
        draft: the program.
        fused: values without memory traffic.
        sizes: the logical shapes of all values on the axes planned so far.
        flops: arithmetic of every operation on the axes planned so far.
    """

    machine: Machine
    draft: Draft
    fused: frozenset[Value]
    sizes: Mapping[Value, tuple[int, ...]]
    flops: Mapping[Operation, float]

    @classmethod
    def of(cls, machine: Machine, draft: Draft, preview: Mapping[Value, Placement] | None, ranks: int) -> LocalCost:
        """The costs of a draft.

        Args:
            machine: the machine.
            draft: the program.
            preview: placements of values on an axis of `ranks` ranks that is planned later, as far as they are guessed.
            ranks: the size of that axis.
        """
        values = (*draft.graph.inputs, *(value for value, _ in draft.graph.constants))
        values += tuple(value for operation in draft.graph.operations for value in operation.tensors)
        guess = preview or {}
        sizes = {value: shrink(draft.local_sizes(value), guess.get(value, Replicate()), ranks) for value in values}
        work = {operation: flops(operation) for operation in draft.graph.operations}
        shares = {operation: _planned_share(draft, operation) for operation, amount in work.items() if amount}
        for operation in shares if guess else ():
            if any(isinstance(guess.get(v), Shard) for v in (*operation.operands, *operation.tensors)):
                shares[operation] /= ranks
        return cls(
            machine,
            draft,
            fused_values(draft.graph),
            sizes,
            {operation: amount * shares.get(operation, 1.0) for operation, amount in work.items()},
        )

    def seconds(self, operation: Operation, strategy: Strategy, axis: str) -> float:
        """Time of an operation that takes `strategy` on one more mesh axis."""
        if self._is_free(operation):
            return 0.0
        traffic = 0
        share = 1.0
        count = self.draft.mesh.axis_size(axis)
        states = (*strategy.operands, *strategy.results)
        for value, state in zip((*operation.operands, *operation.tensors), states, strict=True):
            before = self.sizes[value]
            after = shrink(before, state, count)
            if isinstance(state, Shard) and before[state.dim]:
                share = after[state.dim] / before[state.dim]
            if value not in self.fused:
                traffic += math.prod(after) * value.meta.dtype.itemsize
        seconds = self.machine.compute_seconds(self.flops[operation] * share, traffic)
        return seconds + self._body_seconds(operation, strategy, axis)

    def planned_seconds(self, operation: Operation) -> float:
        """Time of an operation with the strategies that it has on the axes planned so far, without its collectives."""
        if self._is_free(operation):
            return 0.0
        values = (*operation.operands, *operation.tensors)
        traffic = sum(
            math.prod(self.sizes[value]) * value.meta.dtype.itemsize for value in values if value not in self.fused
        )
        return self.machine.compute_seconds(self.flops[operation], traffic)

    def _is_free(self, operation: Operation) -> bool:
        return operation in self.draft.fixed or operation.op is REDISTRIBUTE or is_view(operation)

    def _body_seconds(self, operation: Operation, strategy: Strategy, axis: str) -> float:
        """Time of the collectives in a local body that `strategy` brings to one more axis."""
        if strategy.body is None:
            return 0.0
        chosen = {**self.draft.strategies.get(operation, {}), axis: strategy}
        found = body_collectives(self.draft, operation, chosen)
        return sum(self.machine.collective_seconds(axes, sent) for _, axes, sent in found)


def _planned_share(draft: Draft, operation: Operation) -> float:
    """The part of an operation's arithmetic that one rank does on the planned axes."""
    share = 1.0
    sizes = [flat_shape(draft.logical[value]) for value in (*operation.operands, *operation.tensors)]
    for axis, strategy in draft.strategies.get(operation, {}).items():
        states = (*strategy.operands, *strategy.results)
        after = [shrink(size, state, draft.mesh.axis_size(axis)) for size, state in zip(sizes, states, strict=True)]
        shares = [math.prod(new) / math.prod(old) for old, new in zip(sizes, after, strict=True) if new != old]
        share *= shares[0] if shares else 1.0
        sizes = after
    return share


@attrs.frozen(eq=False)
class MoveCost:
    """Times of moving a value between placements along one mesh axis; local steps are free."""

    machine: Machine
    axis: str
    count: int

    def seconds(self, source: Placement, target: Placement, sizes: Sequence[int], itemsize: int) -> float:
        """Time to bring a tensor from one placement to another.

        Args:
            source, target: the placements.
            sizes: the tensor's shape without this axis.
            itemsize: bytes an element.
        """
        return _move_seconds(self.machine, self.axis, self.count, source, target, tuple(sizes), itemsize)


@lru_cache(maxsize=1 << 18)
def _move_seconds(
    machine: Machine, axis: str, n: int, source: Placement, target: Placement, sizes: tuple[int, ...], itemsize: int
) -> float:
    whole = math.prod(sizes) * itemsize
    if source == target or isinstance(source, Replicate):
        return 0.0
    if isinstance(source, Partial):
        if isinstance(target, Shard):
            return machine.collective_seconds((axis,), ring_bytes(StepKind.REDUCE_SCATTER, n, whole))
        return machine.collective_seconds((axis,), ring_bytes(StepKind.ALL_REDUCE, n, whole))
    if isinstance(target, Shard):
        local = math.prod(shrink(sizes, source, n)) * itemsize
        return machine.collective_seconds((axis,), ring_bytes(StepKind.ALL_TO_ALL, n, local))
    return machine.collective_seconds((axis,), ring_bytes(StepKind.ALL_GATHER, n, whole))
