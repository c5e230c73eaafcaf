"""The pass that copies results which are views of parts of larger tensors, so that these are freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import attrs
import torch

from spmd.collectives.local import LOCALS
from spmd.core.mesh import Mesh
from spmd.core.own_storage import own_memory
from spmd.ir.graph import Annotations, Graph, Operation, Value
from spmd.ir.names import Namer
from spmd.lowering.passes.layouts import COPIES
from spmd.lowering.passes.shards import SHARD
from spmd.plan.local.partial_views import partial_views
from spmd.plan.local.strided import Result, Strided, results_of


def copy_partial_views(graph: Graph, place: tuple[Mesh, int], donated: Collection[int]) -> Graph:
    """Copy results that would hold more memory than their own, after the last operation that reads that memory.

    Args:
        graph: a rank's program.
        place: the mesh and the number of the rank.
        donated: the positions of the donated inputs.
    """
    if not _may_have_views(graph):
        return graph
    aliases = _Aliases(graph, place)
    kept = {value for position, value in enumerate(graph.inputs) if position not in donated}
    found = partial_views(graph.outputs, aliases.bases.__getitem__, lambda base: base.meta.nbytes, kept, aliases.slices)
    last = {aliases.bases[value]: operation for operation in graph.operations for value in operation.operands}
    after: dict[Operation, list[Operation]] = defaultdict(list)
    namer, copies = Namer(graph.names), dict[Value, Value]()
    for base, values in found.items():
        made = {value: Value(namer.fresh(f"{value.name}_copy"), value.meta) for value in values}
        notes = Annotations(tuple_name=namer.fresh("copies") if len(made) > 1 else "")
        copy = Operation(own_memory, values, {}, tuple(made.values()), last[base].source, annotations=notes)
        after[last[base]].append(copy)
        copies |= made
    operations = tuple(each for operation in graph.operations for each in (operation, *after[operation]))
    specs = {**graph.specs, **{copies[value]: spec for value, spec in graph.specs.items() if value in copies}}
    outputs = tuple(copies.get(value, value) for value in graph.outputs)
    return attrs.evolve(graph, operations=operations, outputs=outputs, specs=specs)


def _may_have_views(graph: Graph) -> bool:
    """Test for a result that may be a view of a tensor with more bytes."""
    makers = graph.producers
    for value in graph.outputs:
        nbytes = value.meta.nbytes
        while (maker := makers.get(value)) is not None and maker.operands and _may_return_view(maker):
            value = maker.operands[0]
            if value.meta.nbytes > nbytes:
                return True
    return False


def _may_return_view(operation: Operation) -> bool:
    op = operation.op
    return not isinstance(op, torch._ops.OpOverload) or operation.is_view or op._can_decompose() or op in LOCALS


class _Aliases:
    """The tensor that holds the memory of each value, and the values that reshards have sliced."""

    def __init__(self, graph: Graph, place: tuple[Mesh, int]) -> None:
        given = (*graph.inputs, *(value for value, _ in graph.constants))
        self.bases, self.slices = dict(zip(given, given, strict=True)), set[Value]()
        layouts = {value: Strided.contiguous(value.meta) for value in given}
        for operation in graph.operations:
            results = _results(operation, layouts, place if operation.op in LOCALS else None)
            for value, result in zip(operation.tensors, results, strict=True):
                layouts[value] = result.layout
                viewed = None if result.view_of is None else operation.operands[result.view_of]
                self.bases[value] = value if viewed is None else self.bases[viewed]
                if operation.op is SHARD or viewed in self.slices:
                    self.slices.add(value)


def _results(
    operation: Operation, layouts: Mapping[Value, Strided], place: tuple[Mesh, int] | None
) -> tuple[Result, ...]:
    if isinstance(operation.op, torch._ops.OpOverload):
        return results_of(operation, layouts, place)
    for needed, copy in COPIES.items():
        if operation.op is copy and needed.is_met(layouts[operation.operands[0]].tensor()):
            return (Result(layouts[operation.operands[0]], 0),)
    return tuple(Result(Strided.contiguous(value.meta)) for value in operation.tensors)
