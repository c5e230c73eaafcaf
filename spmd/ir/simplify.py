"""Rewrites of any program, global or of a rank: dead code, identities, common subexpressions, chains of views."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs
import torch

from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.operator_kinds import COPIES, RESHAPERS
from spmd.ir.refusals import refuses_positions
from spmd.ir.regions import CARRY, END, NEXT

aten = torch.ops.aten


def eliminate_dead(graph: Graph, *, collectives: bool = False) -> Graph:
    """Remove unused operations and constants, except operations with effects and those that refuse positions.

    What is computed a second time has refused them before.

    Args:
        graph: the program.
        collectives: whether unused collectives are removed, too: not from the program of one rank, as all ranks must
            run the same ones.
    """
    carried: set[Value] = set()
    while True:
        found, needed = _without_dead(graph, collectives, carried)
        if needed <= carried:
            return found
        carried |= needed


def _without_dead(graph: Graph, collectives: bool, carried: set[Value]) -> tuple[Graph, set[Value]]:
    """The program without dead operations, and the carries of loops that are read; `carried` are known to be."""
    live, read = set(graph.outputs), set()
    fixed: set[Value] | None = None
    kept: list[Operation] = []
    skipped: Operation | None = None  # the beginning of a region without a purpose
    for operation in reversed(graph.operations):
        effect = operation.effect
        if skipped is None and operation.op is END and not _has_purpose(graph, operation, live):
            skipped = graph.producers[operation.operands[0]]
        if skipped is not None:
            skipped = None if operation is skipped else skipped
            continue
        if operation.op is CARRY and operation.tensors[0] in live:
            read.add(operation.tensors[0])
        if operation.op is NEXT and operation.operands[1] in carried:
            live.update(operation.operands)
            kept.append(operation)
            continue
        removable = effect is None or (collectives and effect is Effect.COLLECTIVE)
        if operation.annotations.repetition == 0 and refuses_positions(operation.op):
            positions = [value for value in operation.operands if not value.meta.dtype.is_floating_point]
            fixed = _fixed(graph) if fixed is None else fixed
            removable = removable and fixed.issuperset(positions)
        if live.isdisjoint(operation.tensors) and removable:
            continue
        live.update(operation.operands)
        kept.append(operation)
    constants = tuple((value, tensor) for value, tensor in graph.constants if value in live)
    return attrs.evolve(graph, constants=constants, operations=tuple(reversed(kept))), read


def _has_purpose(graph: Graph, end: Operation, live: AbstractSet[Value]) -> bool:
    """Whether a result of a loop or a branch is live, or something in it has an effect."""
    return any(
        not live.isdisjoint(operation.tensors) or operation.effect not in (None, Effect.REGION)
        for operation in graph.regions.inside(graph.producers[end.operands[0]])
    )


def _fixed(graph: Graph) -> set[Value]:
    """The values that follow from constants alone."""
    fixed = {value for value, _ in graph.constants}
    for operation in graph.operations:
        if operation.effect is None and fixed.issuperset(operation.operands):
            fixed.update(operation.tensors)
    return fixed


def simplify(graph: Graph, *, any_shapes: bool = False) -> Graph:
    """Remove identity operations and common subexpressions, join chains of views and of permutations, and take nothing
    apart that was just stacked.

    Args:
        graph: the program. Operations of a group (`Operation.group`) and those with effects are never merged.
        any_shapes: whether a view of a view is always one view. If not, the ends must have all dim boundaries of the
            shape between them: a sharding may need the dims in between.
    """
    replaced: dict[Value, Value] = {}
    producers: dict[Value, Operation] = {}
    seen: dict[Any, Operation] = {}
    operations: list[Operation] = []
    homes: dict[Operation, Operation | None] = {}
    regions = graph.regions
    for original in graph.operations:
        operation = _join_chain(original.substitute(replaced), producers, any_shapes)
        same = identity(operation)
        known = _unstacked(operation, producers) if same is None else (same,)
        if known is not None:
            replaced.update(zip(operation.tensors, known, strict=True))
            continue
        unique = operation.group is not None or operation.effect is not None or operation.op is CARRY
        twin = operation if unique else seen.setdefault(_key(operation), operation)
        if regions and twin is not operation and homes[twin] not in (None, *regions.path(original)):
            twin = seen[_key(operation)] = operation
        homes[operation] = regions.around(original)
        if twin is not operation:
            pairs = zip(operation.results, twin.results, strict=True)
            replaced.update((old, new) for old, new in pairs if old is not None and new is not None)
            continue
        producers.update(dict.fromkeys(operation.tensors, operation))
        operations.append(operation)
    return graph.substitute(replaced, tuple(operations))


_identities = set(COPIES)


def declare_identity(op: torch._ops.OpOverload) -> None:
    """Declare that an operator returns its first operand unchanged."""
    _identities.add(op)


_ONE_IS_NEUTRAL = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar})
"""Return their first operand unchanged if the second is the number 1 and the result has its shape and dtype."""


def makes_channels_last(operation: Operation) -> bool:
    """Whether an operation copies its operand to channels-last memory, the only memory format that programs keep."""
    formats = (torch.channels_last, torch.channels_last_3d)
    return (
        operation.op in (aten.clone.default, aten._to_copy.default) and operation.kwargs.get("memory_format") in formats
    )


def identity(operation: Operation) -> Value | None:
    """The operand that an operation returns unchanged; None if it does not."""
    if not operation.args or not isinstance(operation.args[0], Value) or len(operation.tensors) != 1:
        return None
    operand, meta = operation.args[0], operation.tensors[0].meta
    if makes_channels_last(operation):
        return None
    if operation.op in _identities:
        return operand
    if operation.op in RESHAPERS and operand.meta == meta:
        return operand
    if operation.op in _ONE_IS_NEUTRAL and operation.group is None and operation.args[1] == 1 and operand.meta == meta:
        return operand
    if operation.op is aten.permute.default and list(operation.args[1]) == list(range(meta.ndim)):
        return operand
    if operation.op is aten.where.self and operation.args[1] is operation.args[2] and operation.args[1].meta == meta:
        return operation.args[1]  # type: ignore[no-any-return]
    if operation.op is aten.slice_scatter.default and operation.args[1].meta == meta:
        return operation.args[1]  # type: ignore[no-any-return]
    return None


def _unstacked(operation: Operation, producers: Mapping[Value, Operation]) -> Sequence[Value] | None:
    """The values that an operation takes apart and another one has put together, as torch's optimizers do."""
    before = producers.get(operation.args[0]) if operation.op is aten.unbind.int else None
    if before is None or before.op is not aten.stack.default or None in operation.results:
        return None
    dims = [other.args[1:] or (other.kwargs.get("dim", 0),) for other in (before, operation)]
    values: Sequence[Value] = before.args[0]
    fits = all(value.meta == part.meta for value, part in zip(values, operation.tensors, strict=True))
    return values if fits and dims[0] == dims[1] else None


_CHAINS = frozenset({aten.view.default, aten.reshape.default, aten.permute.default})
"""Operators of which a call on the result of another call is one call."""


def _join_chain(operation: Operation, producers: Mapping[Value, Operation], any_shapes: bool) -> Operation:
    while operation.op in _CHAINS:
        before = producers.get(operation.args[0])
        if before is None or before.op is not operation.op:
            break
        source, target = before.args[0], operation.args[1]
        if operation.op is aten.permute.default:
            target = [before.args[1][dim] for dim in target]
        elif not any_shapes and not _keeps_dims(source.meta.shape, before.args[1], target):
            break
        operation = attrs.evolve(operation, args=(source, target))
    return operation


def _keeps_dims(source: Sequence[int], middle: Sequence[int], target: Sequence[int]) -> bool:
    """Whether every dim boundary of `middle` is one of `source` or `target`, or these two are the same shape."""
    if tuple(source) == tuple(target):
        return True
    return _boundaries(middle) <= _boundaries(source) | _boundaries(target)


def _boundaries(shape: Sequence[int]) -> set[int]:
    """The dim boundaries of a shape: for each dim, the number of elements in it and the dims inside it."""
    return set(itertools.accumulate(reversed(shape), lambda size, dim: size * dim))


def _key(operation: Operation) -> Any:
    return operation.form, operation.operands, operation.annotations.repetition
