"""Emits one rank's program from a plan: the fragments of all operations, one after the other."""

from __future__ import annotations

import torch

from spmd.core.mesh import Coordinate
from spmd.ir.graph import Annotations, Graph, Operation, Value
from spmd.ir.list_schedule import Unit
from spmd.ir.names import Namer
from spmd.ir.printing import operator_name
from spmd.lowering.repetitions import repetitions
from spmd.plan.data.plan import PlanData
from spmd.plan.local.calls import scheduled
from spmd.plan.local.fragments import Fragments, Known


def emit(plan: PlanData, coordinate: Coordinate, known: Known | None = None) -> Graph:
    """Emit the program of the rank at `coordinate`, not yet optimized.

    Its values are local tensors; `planned` says which of them stand for values of the plan, and `specs` has the Layout
    of these. Operations are annotated with what they run for, collectives with records without cause and time, too.

    Args:
        plan: the plan.
        coordinate: the mesh coordinate of the rank.
        known: as of `Fragments`.
    """
    emitter, graph = _Emitter(plan, Fragments(plan, coordinate, known)), plan.graph
    inputs = tuple(emitter.define(value, emitter.namer.parameter(value.name)) for value in graph.inputs)
    for index, (value, tensor) in enumerate(graph.constants):
        emitter.constants.append((emitter.define(value, emitter.namer.fresh(f"constant_{index}")), tensor))
    for unit in scheduled(plan):
        emitter.emit(unit)
    outputs = tuple(emitter.values[value] for value in graph.outputs)
    operations, constants = tuple(emitter.operations), tuple(emitter.constants)
    return Graph(inputs, constants, operations, outputs, emitter.specs, emitter.values)


class _Emitter:
    """The program under construction, and the local value of every value of the plan so far."""

    def __init__(self, plan: PlanData, fragments: Fragments) -> None:
        self.plan, self.fragments = plan, fragments
        self.namer = Namer()
        self.values: dict[Value, Value] = {}
        self.specs: dict[Value, object] = {}
        self.constants: list[tuple[Value, torch.Tensor]] = []
        self.operations: list[Operation] = []
        self.repetitions = repetitions(plan.graph, plan.specs)

    def define(self, value: Value, name: str) -> Value:
        """The local value of an input or a constant of the plan."""
        self.values[value] = local = Value(name, self.fragments.local(value))
        self.specs[local] = self.plan.layout(value)
        return local

    def emit(self, unit: Unit) -> None:
        """Emit the fragment of a call, with new values."""
        first = unit.operations[0]
        fragment = self.fragments.of(unit)
        graph = fragment.graph
        here = dict(zip(graph.inputs, map(self.values.__getitem__, unit.operands), strict=True))
        for value, tensor in graph.constants:
            here[value] = Value(self.namer.numbered(f"{operator_name(first.op)}_constant"), value.meta)
            self.constants.append((here[value], tensor))
        for operation in graph.operations:
            self.operations.append(self.renamed(operation, first, here))
        made = graph.producers.keys()
        self.specs.update((here[value], spec) for value, spec in graph.specs.items() if value in made)
        for result, local in zip(unit.results, fragment.results, strict=True):
            if result is not None and local is not None:  # torch's meta kernels return gradients not asked for
                self.values[result] = here[local]
                if local in made:
                    self.specs[here[local]] = self.plan.layout(result)

    def renamed(self, operation: Operation, planned: Operation, here: dict[Value, Value]) -> Operation:
        """An operation of the fragment of `planned` on the values in `here`; adds its results to them."""
        name = operator_name(operation.op)
        tuple_name = self.namer.numbered(name) if operation.returns_tuple else ""
        for value in operation.tensors:
            here[value] = Value(self.namer.numbered(name), value.meta)
        results = tuple(None if value is None else here[value] for value in operation.results)
        notes = Annotations(operation.annotations.comm, self.repetitions.get(planned, 0), tuple_name, planned)
        return operation.with_operands(here.__getitem__, results=results, source=planned.source, annotations=notes)
