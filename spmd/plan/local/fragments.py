"""Fragments: the program that a rank runs for one operation of a plan.

Lowering joins the fragments of all operations to the program of a rank; the memory of a plan is that of its fragments.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeAlias

import attrs
import torch

from spmd.collectives.manual import ENTER, LEAVE
from spmd.collectives.primitives import COLLECTIVES
from spmd.collectives.resharding import redistribution
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.ir.comm import Comm
from spmd.ir.graph import Annotations, Graph, Operation, Value, map_leaves
from spmd.ir.list_schedule import Unit
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.plan.data.layout import Layout
from spmd.plan.data.plan import PlanData
from spmd.plan.local.calls import LocalCall, local_implementation, trace_local_call, with_local_size
from spmd.plan.local.steps import localize_step
from spmd.plan.local.strided import RESHAPE, as_reshape
from spmd.rules import find_rule
from spmd.rules.rule import Body
from spmd.rules.strategy import LogicalShape

_CAST = torch.ops.aten._to_copy.default


@attrs.frozen(eq=False)
class Fragment:
    """The program of a rank for one call in a plan; equal calls may share one.

    Args:
        graph: the program; its inputs are the distinct operands (`Unit.operands`). Its collectives have a
            record without cause and predicted time.
        results: the values of the call's results; None for those that it does not make.
    """

    graph: Graph
    results: tuple[Value | None, ...]


Known: TypeAlias = dict[tuple[Operation, ...], Fragment]
"""The fragments of operations that plans of one program share: their values have the same specs in all of them."""


class Fragments:
    """The fragments of a plan for the rank at a coordinate.

    Args:
        plan: the plan.
        coordinate: the mesh coordinate of the rank.
        known: fragments that are known already; new ones are added.
    """

    def __init__(self, plan: PlanData, coordinate: Coordinate, known: Known | None = None) -> None:
        self.plan, self.coordinate = plan, coordinate
        self._known: Known = {} if known is None else known
        self._operators: dict[Hashable, Fragment] = {}
        self._locals: dict[Value, TensorMeta] = {}

    def local(self, value: Value) -> TensorMeta:
        """The meta of the local tensor of a value."""
        found = self._locals.get(value)
        if found is None:
            found = TensorMeta(self.plan.layout(value).shape(self.coordinate), value.meta.dtype)
            self._locals[value] = found
        return found

    def of(self, unit: Unit) -> Fragment:
        """The fragment of a call."""
        found = self._known.get(unit.operations)
        if found is None:
            found = self._known[unit.operations] = self._make(unit)
        return found

    def _make(self, unit: Unit) -> Fragment:
        operation = unit.operations[0]
        if operation.op in (RELABEL, ENTER, LEAVE):
            value = Value("x", self.local(operation.operands[0]))
            return Fragment(Graph((value,), (), (), (value,)), (value,))
        if operation.op is REDISTRIBUTE:
            (operand,), (result,) = operation.operands, operation.tensors
            specs = self.plan.specs[operand], self.plan.specs[result]
            reduce_dtype = self.plan.request.reduce_dtype
            return _redistribution(*specs, self.plan.logical[result], self.coordinate, reduce_dtype)
        found = self.local_implementation(operation)
        return self._operator(unit) if found is None else self._traced(operation, *found)

    def local_implementation(self, operation: Operation) -> tuple[Body, tuple[str, ...]] | None:
        """The local implementation that this rank runs and its mesh axes, major first; None for the operator itself."""
        planned = local_implementation(self.plan.strategies.get(operation, {}))
        rule = find_rule(operation.op, self.plan.request.rules)
        if planned is not None or rule is None:
            return planned
        full = all(self.local(value).numel for value in operation.operands)
        body = rule.local if full or rule.empty is None else rule.empty
        return None if body is None else (body, ())

    def _operator(self, unit: Unit) -> Fragment:
        """The operator itself, on local tensors and with local sizes; equal calls share one fragment."""
        if len(unit.operations) > 1:
            return self._call(unit)
        (operation,), numbers = unit.operations, {value: number for number, value in enumerate(unit.operands)}
        operands = tuple([(numbers[value], self.local(value)) for value in operation.operands])
        results = tuple([None if value is None else self.local(value) for value in operation.results])
        key = operation.form, operands, results
        if key not in self._operators:
            self._operators[key] = self._call(unit)
        return self._operators[key]

    def _call(self, unit: Unit) -> Fragment:
        inputs = {value: Value(value.name, self.local(value)) for value in unit.operands}
        local = lambda leaf: inputs[leaf] if isinstance(leaf, Value) else leaf  # noqa: E731
        args, kwargs = map_leaves(local, unit.args), map_leaves(local, dict(unit.kwargs))
        results = tuple(None if value is None else Value(value.name, self.local(value)) for value in unit.results)
        rule = find_rule(unit.op, self.plan.request.rules)
        if rule is not None and rule.size_argument is not None:
            assert results[0] is not None
            args = with_local_size(args, rule.size_argument, results[0].meta.shape)
        call = _lowered(Operation(unit.op, args, kwargs, results, unit.operations[0].source), self.plan.mesh)
        return Fragment(Graph(tuple(inputs.values()), (), (call,), call.tensors), results)

    def _traced(self, operation: Operation, body: Body, axes: tuple[str, ...]) -> Fragment:
        """A local implementation."""

        def unsharded(value: Value) -> TensorMeta:
            return TensorMeta(self.plan.layout(value).without(axes).shape(self.coordinate), value.meta.dtype)

        rule = find_rule(operation.op, self.plan.request.rules)
        call = LocalCall.of(
            body,
            axes,
            operation,
            self.plan.mesh,
            self.local,
            unsharded,
            size_argument=None if rule is None else rule.size_argument,
            reduce_dtype=self.plan.request.reduce_dtype,
        )
        return local_fragment(call)


@lru_cache(maxsize=512)
def local_fragment(call: LocalCall) -> Fragment:
    """The fragment of a call of a local implementation; equal calls share one."""
    graph, results = trace_local_call(call)
    operations = tuple(_lowered(operation, call.mesh) for operation in graph.operations)
    return Fragment(attrs.evolve(graph, operations=operations), results)


def _lowered(operation: Operation, mesh: Mesh) -> Operation:
    """An operation on local tensors, with the record of its collective if it is one."""
    if operation.op not in COLLECTIVES:
        return as_reshape(operation)
    operand, *rest, axes = operation.args
    collective, counts, held = COLLECTIVES[operation.op], tuple(map(mesh.axis_size, axes)), operand.meta
    sent = collective.most_bytes_sent(counts, held.shape, held.dtype.itemsize, rest)
    return attrs.evolve(operation, annotations=_collective(collective.kind, axes, sent))


def _collective(kind: str, axes: Any, sent: float) -> Annotations:
    return Annotations(Comm(kind, tuple(axes), sent, 0.0, "", None))


@lru_cache(maxsize=16384)
def _redistribution(
    source: DTensorSpec,
    target: DTensorSpec,
    atoms: LogicalShape,
    coordinate: Coordinate,
    reduce_dtype: torch.dtype | None,
) -> Fragment:
    """The steps from one spec to another, each over physical dims where possible."""
    start = here = Value("x", TensorMeta(Layout(source, atoms).shape(coordinate), source.meta.dtype))
    specs: dict[Value, object] = {start: Layout(source, atoms)}
    operations: list[Operation] = []

    def call(
        op: Any, args: tuple[Any, ...], meta: TensorMeta, layout: Any, notes: Annotations | None = None, **kwargs: Any
    ) -> Value:
        result = Value("x", meta)
        specs[result] = layout
        operations.append(Operation(op, args, kwargs, (result,), annotations=notes or Annotations()))
        return result

    def reshape(x: Value, shape: tuple[int, ...]) -> Value:
        meta = TensorMeta(shape, x.meta.dtype)
        return x if x.meta == meta else call(RESHAPE, (x, list(shape)), meta, specs[x])

    def cast(x: Value, dtype: torch.dtype) -> Value:
        meta = TensorMeta(x.meta.shape, dtype)
        return x if x.meta == meta else call(_CAST, (x,), meta, specs[x], dtype=dtype)

    for step in redistribution(source, target, reduce_dtype):
        local = localize_step(step, atoms, coordinate)
        here = cast(reshape(here, local.view), step.sent_dtype)
        notes = _collective(*step.sent) if step.is_collective else None
        arguments = (here, *local.step.arguments(coordinate))
        meta = TensorMeta(local.step.target.local_shape(coordinate), step.sent_dtype)
        here = call(local.step.primitive.op, arguments, meta, Layout(step.target, atoms), notes)
    here = reshape(cast(here, source.meta.dtype), Layout(target, atoms).shape(coordinate))
    return Fragment(Graph((start,), (), tuple(operations), (here,), specs), (here,))
