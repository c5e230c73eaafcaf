"""Brings a traced program to few kinds of operators, so that few rules make good plans.

Canonical programs are written as follows.

* No list operators: their elements are operations that share a group (`spmd.ir.list_operators`).
* No means: a sum and a division (`decompositions`).
* What is known to be one number everywhere is that number (`constant_folding`).
* One spelling for each meaning (`normal_forms`); `view.default` stands for any change of shape and copies where strides
  demand it, as `torch.reshape`: strides are not part of a program.
* No operation that does nothing, none twice, none unused. A copy to contiguous memory does nothing: lowering makes
  those that a kernel needs (`spmd.rules.layouts`). One to channels-last memory stays.
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

_ROUNDS = 8  # decompositions of decompositions; the deepest in torch is four levels


def canonicalize(graph: Graph, decompose: Callable[[OpOverload], bool] | None = None) -> Graph:
    """The canonical form of a program: the same values, fewer kinds of operators.

    Args:
        graph: a traced program.
        decompose: tells which operators have no rule; those are decomposed, as deep as torch's decompositions go.
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
    """Replace the operators of `DECOMPOSITIONS`, also inside decompositions."""
    for _ in range(_ROUNDS):
        simpler = expand_operations(graph, lambda operation: DECOMPOSITIONS.get(operation.op))
        if simpler.operations == graph.operations:
            return graph
        graph = simpler
    return graph


def simplify(graph: Graph) -> Graph:
    """Drop operations that do nothing, join chains of views and of permutations, share what is computed twice."""
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
    """Drop operations and constants whose results nobody uses, but no draw: it moves the generator on."""
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
"""Give their operand: in a functional program a copy cannot be told from the original."""

_RESHAPERS = frozenset({
    aten.view.default, aten.expand.default, aten._to_copy.default, aten.slice.Tensor, aten.repeat.default,
})  # fmt: skip
"""Give their operand where shape and dtype stay."""

_ONE_IS_NEUTRAL = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar})
"""Give their first operand where the second is the number 1 and shape and dtype stay."""


def _identity(operation: Operation) -> Value | None:
    """The operand that an operation gives unchanged, if it does."""
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
    """A view of a view, or a permutation of a permutation, as one; a view only where no dim boundary is lost."""
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
    """Whether a view through `middle` tells nothing that its ends do not; a round trip tells nothing either."""
    if tuple(source) == tuple(target):
        return True
    return _boundaries(middle) <= _boundaries(source) | _boundaries(target)


def _boundaries(shape: Sequence[int]) -> set[int]:
    """Where dims end, as the number of elements inside each."""
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
"""In order of execution: dead code goes last, after what made it so."""
