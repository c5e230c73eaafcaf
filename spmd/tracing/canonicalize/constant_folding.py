"""Constant folding of tensors whose elements are all one number that is known from the program."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value, iterate_leaves, map_leaves
from spmd.ir.number import Number as DynamicNumber

Number = bool | int | float | complex
aten = torch.ops.aten

_SHAPERS = frozenset({
    aten.view.default, aten.expand.default, aten.permute.default, aten._to_copy.default, aten.alias.default,
})  # fmt: skip
_COMMUTATIVE = frozenset({aten.add.Tensor, aten.mul.Tensor})
_TAKES_NUMBER = _COMMUTATIVE | {aten.sub.Tensor, aten.div.Tensor}


def fold_constants(graph: Graph) -> Graph:
    """Fold pointwise and shape operators on tensors of one number, which occur in the gradient of a mean for example.

    `div(expand(full([], 1), [8, 4]), 32)` becomes `full([8, 4], 1 / 32)`, and `mul(full([8, 4], 2), x)` becomes
    `mul(x, 2)` if x has the shape and dtype of the result.
    """
    fills: dict[Value, Number] = {}
    operations = []
    for operation in graph.operations:
        number = _fill_of(operation, fills)
        if number is not None:
            (result,) = operation.tensors
            fills[result] = number
            operation = _full(operation, result.meta, number)
        operations.append(_with_number(operation, fills))
    return attrs.evolve(graph, operations=tuple(operations))


def _full(operation: Operation, meta: TensorMeta, number: Number) -> Operation:
    kwargs = {"dtype": meta.dtype}
    return attrs.evolve(operation, op=aten.full.default, args=(list(meta.shape), number), kwargs=kwargs, group=None)


def _fill_of(operation: Operation, fills: Mapping[Value, Number]) -> Number | None:
    """The number that all elements of an operation's only result have; None if that is not known."""
    if any(isinstance(leaf, DynamicNumber) for leaf in iterate_leaves((operation.args, dict(operation.kwargs)))):
        return None
    if operation.op is aten.full.default:
        number = operation.args[1]
        if type(number) is int and operation.tensors[0].meta.dtype.is_floating_point and int(float(number)) == number:
            return float(number)  # one form of equal tensors
        return number if isinstance(number, Number) else None
    known = all(operand in fills for operand in operation.operands)
    if not operation.operands or not known or len(operation.results) != 1:
        return None
    if operation.op in _SHAPERS and operation.tensors[0].meta.dtype == operation.operands[0].meta.dtype:
        return fills[operation.operands[0]]
    pointwise = torch.Tag.pointwise in operation.op.tags and operation.op is not aten._to_copy.default
    return _apply(operation, fills) if pointwise and not operation.is_random else None


def _apply(operation: Operation, fills: Mapping[Value, Number]) -> Number | None:
    """The result of a pointwise operator on its operands' numbers, computed by the operator on one-element tensors."""

    def element(leaf: object) -> object:
        if not isinstance(leaf, Value):
            return leaf
        return torch.full((1,) * leaf.meta.ndim, fills[leaf], dtype=leaf.meta.dtype)

    kwargs = map_leaves(element, dict(operation.kwargs))
    result = operation.op(*map_leaves(element, operation.args), **kwargs)
    if not isinstance(result, torch.Tensor) or result.dtype != operation.tensors[0].meta.dtype:
        return None
    number: Number = result.item()
    return number


def _with_number(operation: Operation, fills: Mapping[Value, Number]) -> Operation:
    """An arithmetic operation with an operand of one number replaced by that number."""
    if operation.op not in _TAKES_NUMBER or len(operation.operands) != 2 or operation.group is not None:
        return operation
    left, right = operation.args[:2]
    if left in fills and right not in fills and operation.op in _COMMUTATIVE and "alpha" not in operation.kwargs:
        left, right = right, left
    meta = operation.tensors[0].meta
    if right not in fills or left.meta != meta or right.meta.dtype != meta.dtype:
        return operation
    return attrs.evolve(operation, args=(left, fills[right]))
