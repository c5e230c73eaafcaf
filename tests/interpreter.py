"""Runs a graph on real tensors: what a program means, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd.ir.graph import Graph, Operation, Value, iterate_leaves, map_leaves
from spmd.rules.layouts import laid_out


def evaluate(graph: Graph, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of a program for given inputs, one operator after the other, unsharded.

    >>> from spmd.tracing.trace import trace
    >>> x = torch.ones(2)
    >>> evaluate(trace(lambda x: x + 1, (x,)).graph, [x])
    (tensor([2., 2.]),)
    """
    values = dict(graph.constants) | dict(zip(graph.inputs, inputs, strict=True))
    with torch.no_grad():
        for operation in graph.operations:
            results = list(iterate_leaves(_call(operation, values)))
            for value, result in zip(operation.results, results, strict=True):
                if value is not None:
                    values[value] = result
    return tuple(values[value] for value in graph.outputs)


def _call(operation: Operation, values: dict[Value, torch.Tensor]) -> Any:
    concrete = lambda leaf: values[leaf] if isinstance(leaf, Value) else leaf  # noqa: E731
    args, kwargs = map_leaves(concrete, operation.args), map_leaves(concrete, dict(operation.kwargs))
    if operation.op is torch.ops.aten.view.default:  # strides are no part of a program: see `canonicalize`
        return args[0].reshape(args[1])
    args, kwargs = laid_out(operation.op, args, kwargs)
    return operation.op(*args, **kwargs)
