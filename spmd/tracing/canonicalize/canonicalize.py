"""Rewrites a traced program with few kinds of operators, so that few sharding rules are needed.

A canonical program has

* no list operators: their elements are operations that share a group (`spmd.ir.list_operators`);
* no means: each is a sum and a division (`decompositions`);
* no computation whose result is known to be one number everywhere (`constant_folding`);
* one form for operations that mean the same (`normal_forms`). `view.default` is any change of shape, and copies where
  strides require it, as `torch.reshape` does: strides are not part of a program;
* no identity operations, no common subexpressions and no dead code. A copy to contiguous memory counts as an identity:
  lowering inserts the copies that a kernel needs (`spmd.rules.layouts`). A copy to channels-last memory stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from spmd.ir.graph import Graph, Operation, Value, freeze
from spmd.ir.list_operators import split_lists
from spmd.tracing.canonicalize.constant_folding import fold_constants
from spmd.tracing.canonicalize.decompositions import DECOMPOSITIONS, decompose_operations, expand_operations, substitute
from spmd.tracing.canonicalize.normal_forms import makes_channels_last, normalize

OpOverload = torch._ops.OpOverload
aten = torch.ops.aten

_ROUNDS = 8  # how often decompositions are decomposed further; torch's are at most four levels deep


def canonicalize(graph: Graph, decompose: Callable[[OpOverload], bool] | None = None) -> Graph:
    """The canonical form of a program: it computes the same values with fewer kinds of operators.

    Args:
        graph: a traced program.
        decompose: whether an operator has no sharding rule and needs decomposing. torch's decompositions are applied
            to such operators, also to those in the decompositions. None applies only `DECOMPOSITIONS`.

    Returns:
        The canonical program, verified.
    """
    graph = _run_passes(graph)
    for _ in range(_ROUNDS if decompose is not None else 0):
        simpler = decompose_operations(graph, decompose)  # type: ignore[arg-type]
        if simpler.operations == graph.operations:
            break
        graph = _run_passes(simpler)
    return graph.verify()


def _run_passes(graph: Graph) -> Graph:
    for run in PASSES:
        graph = run(graph)
    return graph


def expand_known(graph: Graph) -> Graph:
    """Replace the operators in `DECOMPOSITIONS` by their decompositions, repeatedly."""
    for _ in range(_ROUNDS):
        simpler = expand_operations(graph, lambda operation: DECOMPOSITIONS.get(operation.op))
        if simpler.operations == graph.operations:
            return graph
        graph = simpler
    return graph


def simplify(graph: Graph) -> Graph:
    """Remove identity operations and common subexpressions, and join chains of views and of permutations."""
    replaced: dict[Value, Value] = {}
    producers: dict[Value, Operation] = {}
    seen: dict[Any, Operation] = {}
    operations: list[Operation] = []
    for operation in graph.operations:
        operation = _join_chain(substitute(operation, replaced), producers)
        same = _identity(operation)
        if same is not None:
            replaced[operation.tensors[0]] = same
            continue
        twin = (
            None if operation.group is not None or operation.is_random else seen.setdefault(_key(operation), operation)
        )
        if twin is not None and twin is not operation:
            pairs = zip(operation.results, twin.results, strict=True)
            replaced.update((old, new) for old, new in pairs if old is not None and new is not None)
            continue
        producers.update(dict.fromkeys(operation.tensors, operation))
        operations.append(operation)
    outputs = tuple(replaced.get(value, value) for value in graph.outputs)
    return attrs.evolve(graph, operations=tuple(operations), outputs=outputs)


def eliminate_dead(graph: Graph) -> Graph:
    """Remove unused operations and constants, except random operators: they advance the generator."""
    live = set(graph.outputs)
    kept = []
    for operation in reversed(graph.operations):
        if live.isdisjoint(operation.tensors) and not operation.is_random:
            continue
        live.update(operation.operands)
        kept.append(operation)
    constants = tuple((value, tensor) for value, tensor in graph.constants if value in live)
    return attrs.evolve(graph, constants=constants, operations=tuple(reversed(kept)))


_COPIES = frozenset({
    aten.detach.default, aten.alias.default, aten.clone.default, aten.lift.default, aten.lift_fresh.default,
    aten.lift_fresh_copy.default, aten.contiguous.default, aten.detach_copy.default, aten.alias_copy.default,
})  # fmt: skip
"""Return their operand unchanged: in a functional program a copy is equivalent to the original."""

_RESHAPERS = frozenset({
    aten.view.default, aten.expand.default, aten._to_copy.default, aten.slice.Tensor, aten.repeat.default,
})  # fmt: skip
"""Return their operand unchanged if the result has its shape and dtype."""

_ONE_IS_NEUTRAL = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar})
"""Return their first operand unchanged if the second is the number 1 and the result has its shape and dtype."""


def _identity(operation: Operation) -> Value | None:
    """The operand that an operation returns unchanged; None if it does not."""
    if not operation.args or not isinstance(operation.args[0], Value) or len(operation.tensors) != 1:
        return None
    operand, meta = operation.args[0], operation.tensors[0].meta
    if makes_channels_last(operation):
        return None
    if operation.op in _COPIES:
        return operand
    if operation.op in _RESHAPERS and operand.meta == meta:
        return operand
    if operation.op in _ONE_IS_NEUTRAL and operation.group is None and operation.args[1] == 1 and operand.meta == meta:
        return operand
    if operation.op is aten.permute.default and list(operation.args[1]) == list(range(meta.ndim)):
        return operand
    if operation.op is aten.slice_scatter.default and operation.args[1].meta == meta:
        return operation.args[1]  # type: ignore[no-any-return]
    return None


def _join_chain(operation: Operation, producers: dict[Value, Operation]) -> Operation:
    """Join a view of a view, or a permutation of a permutation; views only if the ends have all its dim boundaries."""
    while operation.op in (aten.view.default, aten.permute.default):
        before = producers.get(operation.args[0])
        if before is None or before.op is not operation.op:
            break
        source, target = before.args[0], operation.args[1]
        if operation.op is aten.permute.default:
            target = [before.args[1][dim] for dim in target]
        elif not _keeps_dims(source.meta.shape, before.args[1], target):
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
    return operation.op, freeze(operation.args), freeze(dict(operation.kwargs))


PASSES: tuple[Callable[[Graph], Graph], ...] = (
    expand_known,
    split_lists,
    normalize,
    fold_constants,
    simplify,
    eliminate_dead,
)
"""The passes in order of execution; dead code is removed last, because the other passes create it."""
