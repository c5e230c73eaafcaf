"""Which elements of values are those of empty memory that no operation has written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from spmd.ir.evaluation import evaluated
from spmd.ir.graph import Graph, Operation, Value, iterate_leaves, map_leaves
from spmd.ir.operator_kinds import COPIES, FILLS, INDEXED_WRITES, LIKE
from spmd.ir.random_operators import TEMPLATED

aten = torch.ops.aten

Mask: TypeAlias = bool | torch.Tensor
"""For each element whether it is unwritten; one boolean for all of them."""

_EMPTY = frozenset({
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.empty_permuted.default,
})  # fmt: skip
_WRITES = frozenset({aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default})
_MOVES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.repeat.default})
"""Operators of shapes that are no views, or that functional programs have as such."""


def unwritten(graph: Graph) -> tuple[Mask, ...]:
    """For each output of a program which elements depend on memory that was allocated and not written to.

    Views, copies and writes to parts are followed element by element; other results are unwritten altogether if an
    operand has such an element.
    """
    masks: dict[Value, Mask] = {}
    for operation in graph.operations:
        found = _masks(graph, operation, [masks.get(value, False) for value in operation.operands])
        masks.update(zip(operation.tensors, found, strict=True))
    return tuple(masks.get(value, False) for value in graph.outputs)


def count(mask: Mask, size: int) -> int:
    """How many of the elements of a value are unwritten."""
    return int(mask.sum()) if isinstance(mask, torch.Tensor) else size * mask


def _masks(graph: Graph, operation: Operation, given: list[Mask]) -> list[Mask]:
    op, results = operation.op, operation.tensors
    if op in _EMPTY:
        return [True for _ in results]
    if op in LIKE or op in TEMPLATED or op in FILLS or not any(isinstance(x, torch.Tensor) or x for x in given):
        return [False for _ in results]
    if op in COPIES or op is aten._to_copy.default or op is torch.ops.prims.convert_element_type.default:
        return [given[0]]
    if op is aten.copy.default:
        return [
            _shaped(given[1], operation.operands[1]).expand(results[0].meta.shape) if given[1] is not False else False
        ]
    if op in _WRITES or op in _MOVES or operation.is_view:
        return _same_operator(operation, [_shaped(x, v) for x, v in zip(given, operation.operands, strict=True)])
    if op in INDEXED_WRITES:
        return _indexed_write(graph, operation, given)
    return [any(_any(x) for x in given) for _ in results]


def _indexed_write(graph: Graph, operation: Operation, given: list[Mask]) -> list[Mask]:
    """The masks of `index_put`, where positions are known."""
    target, values = operation.operands[0], operation.operands[-1]
    positions = operation.operands[1:-1]
    known = {value: evaluated(value, graph.operations, dict(graph.constants)) for value in positions}
    if any(x is None for x in known.values()):
        return [any(_any(x) for x in given)]
    masks = [_shaped(given[0], target), *known.values(), _shaped(given[-1], values)]
    return _same_operator(operation, masks)


def _same_operator(operation: Operation, operands: list[Any]) -> list[Mask]:
    """The masks of the results of an operator that moves elements."""
    rest = iter(operands)
    take: Callable[[Any], Any] = lambda leaf: next(rest) if isinstance(leaf, Value) else leaf  # noqa: E731
    args, kwargs = map_leaves(take, operation.args), map_leaves(take, dict(operation.kwargs))
    return [_compact(x) for x in iterate_leaves(operation.op(*args, **kwargs))]


def _shaped(mask: Mask, value: Value) -> torch.Tensor:
    return mask if isinstance(mask, torch.Tensor) else torch.tensor(mask).expand(value.meta.shape)


def _any(mask: Mask) -> bool:
    return bool(mask.any()) if isinstance(mask, torch.Tensor) else mask


def _compact(mask: torch.Tensor) -> Mask:
    return mask if mask.any() else False
