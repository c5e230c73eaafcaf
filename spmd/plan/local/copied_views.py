"""Which views of a program copy, because of the strides of what they view: as a reshape does after a transposition."""

from __future__ import annotations

from spmd.ir.graph import Graph, Value
from spmd.ir.markers import DRAFT_MARKERS, FREE
from spmd.plan.data.of_program import of_graph
from spmd.plan.local.strided import Result, Strided, as_reshape, results_of


def copied_views(graph: Graph, planned: Graph | None = None) -> frozenset[Value]:
    """The results of views that are copies of what they view.

    Strides are those of the program on one device, with inputs in row-major order. The shards of a plan may have
    others, but mostly the same views copy.

    Args:
        graph: the program.
        planned: the program of a plan for it, perhaps with views of its own.
    """
    if planned is not None and any(o.is_view and o.tensors[0] not in graph.producers for o in planned.operations):
        graph = planned
    return _copies(graph)


@of_graph
def _copies(graph: Graph) -> frozenset[Value]:
    layouts = {value: Strided.contiguous(value.meta) for value in (*graph.inputs, *dict(graph.constants))}
    copied = set()
    for operation in graph.operations:
        if operation.op in DRAFT_MARKERS or operation.op is FREE:
            results: tuple[Result, ...] = (Result(layouts[operation.operands[0]], 0),)
        else:
            results = results_of(as_reshape(operation), layouts)
        for value, result in zip(operation.tensors, results, strict=True):
            layouts[value] = result.layout
            if operation.is_view and result.view_of is None:
                copied.add(value)
    return frozenset(copied)
