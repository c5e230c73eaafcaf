"""Scans from the end of a dim, and gradients of running extremes: one operator each for what torch computes by several.

A flip of a sharded dim moves all of it, but a scan from its end needs only the totals of the shards after it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.ir.canonical_scans import ADD_AT_EXTREMES, REVERSED
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.names import Namer

aten = torch.ops.aten

_EXTREMES = frozenset({aten.cummax.default, aten.cummin.default})


def join_scans(graph: Graph) -> Graph:
    """Join `flip(scan(flip(x)))` to a scan from the end, and a write to the positions of running extremes to one call.

    The flip inside may also be of the parts of a `cat`, as in the gradient of a product.
    """
    producers: dict[Value, Operation] = {}
    operations: list[Operation] = []
    namer = Namer(graph.names)
    for operation in graph.operations:
        added = _scan_from_end(operation, producers, namer) or _write_at_extremes(operation, producers) or [operation]
        for each in added:
            producers.update(dict.fromkeys(each.tensors, each))
        operations += added
    return attrs.evolve(graph, operations=tuple(operations))


def _scan_from_end(operation: Operation, producers: Mapping[Value, Operation], namer: Namer) -> list[Operation]:
    """The operations that compute a flip of a scan by a scan from the end; none if it is no such flip."""
    scan = producers.get(operation.args[0]) if operation.op is aten.flip.default else None
    if scan is None or scan.op not in REVERSED or list(operation.args[1]) != [scan.args[1]]:
        return []
    added: list[Operation] = []
    operand = _flipped(scan.args[0], scan.args[1], producers, namer, added)
    if operand is None:
        return []
    args = (operand, *scan.args[1:])
    return [*added, attrs.evolve(operation, op=REVERSED[scan.op], args=args, kwargs=scan.kwargs)]


def _flipped(
    value: Value, dim: int, producers: Mapping[Value, Operation], namer: Namer, added: list[Operation]
) -> Value | None:
    """A value flipped along a dim, if no flip is needed for that; operations that it takes go to `added`."""
    before = producers.get(value)
    if not value.meta.ndim or value.meta.shape[dim] == 1 or (before is not None and before.op is aten.full.default):
        return value
    if before is None:
        return None
    if before.op is aten.flip.default and list(before.args[1]) == [dim]:
        return before.args[0]  # type: ignore[no-any-return]
    if before.op is aten.cat.default and (before.args[1:] or (0,)) == (dim,):
        parts = [_flipped(part, dim, producers, namer, added) for part in reversed(before.args[0])]
        result = Value(namer.fresh("cat"), TensorMeta(value.meta.shape, value.meta.dtype))
        if None not in parts:
            added.append(attrs.evolve(before, args=(parts, *before.args[1:]), results=(result,)))
            return result
    return None


def _write_at_extremes(operation: Operation, producers: Mapping[Value, Operation]) -> list[Operation]:
    """The gradient of a running extreme as one operation; none if it is another one."""
    if operation.op is not aten.scatter_add.default:
        return []
    zeros, dim, index, grad = operation.args
    origin, fill = producers.get(index), producers.get(zeros)
    if origin is None or origin.op not in _EXTREMES or origin.tensors[1] is not index or origin.args[1] != dim:
        return []
    if fill is None or fill.op is not aten.full.default or fill.args[1] != 0 or zeros.meta != grad.meta:
        return []
    fits = grad.meta.shape == index.meta.shape
    return [attrs.evolve(operation, op=ADD_AT_EXTREMES, args=(grad, dim, index))] if fits else []
