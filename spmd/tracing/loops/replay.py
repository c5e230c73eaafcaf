"""Programs as functions of tensors, for transforms of the bodies of loops and branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Value, iterate_leaves, map_leaves
from spmd.ir.number import Number
from spmd.tracing.loops.closed import without_outer_traces
from spmd.tracing.loops.constructs import Recorded, steps
from spmd.tracing.numbers import traced
from spmd.tracing.source import at_line
from spmd.tracing.trace import trace_flat

Apply = Callable[..., Sequence[torch.Tensor]]


def replay(graph: Graph, tensors: Sequence[torch.Tensor], apply: Apply) -> list[torch.Tensor]:
    """Call the operators of a program without constants.

    Args:
        graph: the program.
        tensors: its inputs.
        apply: calls a construct in it with its operands.
    """
    known: dict[Value, Any] = dict(zip(graph.inputs, tensors, strict=True))
    take = lambda leaf: known[leaf] if isinstance(leaf, Value) else traced(leaf) if isinstance(leaf, Number) else leaf  # noqa: E731
    for step in steps(graph):
        if isinstance(step, Recorded):
            with at_line(step.source):
                made = apply(step.construct, *map(take, step.operands))
            known.update(zip(step.results, made, strict=True))
            continue
        with at_line(step.source):
            found = step.op(*map_leaves(take, step.args), **map_leaves(take, dict(step.kwargs)))
        pairs = zip(step.results, iterate_leaves(found), strict=True)
        known.update((value, tensor) for value, tensor in pairs if value is not None)
    return [known[value] for value in graph.outputs]


def retrace(function: Callable[..., Sequence[torch.Tensor]], like: Sequence[TensorMeta]) -> Graph:
    """Trace a function of tensors that closes over none."""
    with without_outer_traces():
        return trace_flat(function, like)
