"""Emits one rank's program from a plan: operations on local tensors, redistributions as collectives."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from spmd.collectives.bytes_sent import max_bytes_sent
from spmd.collectives.primitives import COLLECTIVES
from spmd.collectives.resharding import redistribution
from spmd.core.mesh import Coordinate
from spmd.core.spec import TensorMeta
from spmd.ir.graph import NOT_ANNOTATED, Annotations, Graph, Operation, Source, Value, map_leaves
from spmd.ir.list_schedule import Unit, schedule
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.ir.names import Namer
from spmd.ir.printing import operator_name
from spmd.lowering.steps import localize_step
from spmd.plan.data.layout import Layout
from spmd.plan.data.local_calls import (
    LocalCall,
    local_implementation,
    runs_local_implementation,
    trace_local_call,
    with_local_size,
)
from spmd.plan.data.plan import PlanData
from spmd.plan.memory.rematerialization import repetitions
from spmd.rules import find_rule
from spmd.rules.rule import Body, Rule

RESHAPE = torch.ops.aten.reshape.default
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})
"""Views that are lowered to `aten.reshape`: a shard may have other strides than the global tensor, or than the operands
with which a local implementation was traced."""


def emit(plan: PlanData, rules: Mapping[Any, Rule], input_names: Sequence[str], coordinate: Coordinate) -> Graph:
    """Emit the program of the rank at `coordinate`, not yet optimized.

    Its values are local tensors; `specs` has the Layout of those that stand for a value of the plan. Collectives and
    rematerialized operations are annotated.

    Args:
        plan: the plan.
        rules: the rules that the plan was made with.
        input_names: for each input, a name or a path (`params['w']`), from which the input's value is named.
        coordinate: the mesh coordinate of the rank.
    """
    emitter = _Emitter(plan, rules, coordinate)
    graph = plan.graph
    inputs = tuple(
        emitter.define(value, emitter.namer.parameter(_identifier(name)))
        for value, name in zip(graph.inputs, input_names, strict=True)
    )
    for index, (value, tensor) in enumerate(graph.constants):
        emitter.constants.append((emitter.define(value, emitter.namer.fresh(f"constant_{index}")), tensor))
    alone = frozenset(o for o in graph.operations if runs_local_implementation(o, plan.strategies.get(o, {}), rules))
    for unit in schedule(graph.operations, alone):
        emitter.emit(unit)
    outputs = tuple(emitter.values[value] for value in graph.outputs)
    return Graph(inputs, tuple(emitter.constants), tuple(emitter.operations), outputs, emitter.specs)


class _Emitter:
    """The program under construction, and the local value of every value of the plan so far."""

    def __init__(self, plan: PlanData, rules: Mapping[Any, Rule], coordinate: Coordinate) -> None:
        self.plan, self.rules, self.coordinate = plan, rules, coordinate
        self.namer = Namer()
        self.values: dict[Value, Value] = {}
        self.specs: dict[Value, Layout] = {}
        self.constants: list[tuple[Value, torch.Tensor]] = []
        self.operations: list[Operation] = []
        self.repetitions = repetitions(plan.graph, plan.specs)
        self.annotations = NOT_ANNOTATED

    def local(self, value: Value) -> TensorMeta:
        return TensorMeta(self.plan.layout(value).shape(self.coordinate), value.meta.dtype)

    def define(self, value: Value, name: str) -> Value:
        """The local value of a value of the plan."""
        self.values[value] = local = Value(name, self.local(value))
        self.specs[local] = self.plan.layout(value)
        return local

    def call(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], meta: TensorMeta, source: Source | None = None
    ) -> Value:
        """The result of a new operation that returns one tensor."""
        result = Value(self.namer.numbered(operator_name(op)), meta)
        self.operations.append(Operation(op, args, kwargs, (result,), source, annotations=self.annotations))
        return result

    def local_implementation(self, operation: Operation) -> tuple[Body, tuple[str, ...]] | None:
        """The local implementation that this rank runs and its mesh axes, major first; None for the operator itself."""
        planned = local_implementation(self.plan.strategies.get(operation, {}))
        rule = find_rule(operation.op, self.rules)
        if planned is not None or rule is None or rule.empty is None:
            return planned
        return None if all(self.local(value).numel for value in operation.operands) else (rule.empty, ())

    def emit(self, unit: Unit) -> None:
        operation = unit.operations[0]
        self.annotations = Annotations(repetition=self.repetitions.get(operation, 0))
        if operation.op is RELABEL:
            self.values[operation.tensors[0]] = self.values[operation.operands[0]]
        elif operation.op is REDISTRIBUTE:
            self.redistribute(operation)
        elif found := self.local_implementation(operation):
            self.inline_local_implementation(operation, *found)
        else:
            self.operator(unit)

    def operator(self, unit: Unit) -> None:
        """Emit the operator itself, on local tensors and with local sizes."""
        replace = lambda leaf: self.values[leaf] if isinstance(leaf, Value) else leaf  # noqa: E731
        operation = unit.operations[0]
        args = tuple(map_leaves(replace, unit.args))
        kwargs = map_leaves(replace, dict(unit.kwargs))
        rule = find_rule(unit.op, self.rules) if len(unit.operations) == 1 else None
        if rule is not None and rule.size_argument is not None:
            args = with_local_size(args, rule.size_argument, self.local(operation.tensors[0]).shape)
        results = operation.results if len(unit.operations) == 1 else tuple(o.results[0] for o in unit.operations)
        op = RESHAPE if unit.op in _VIEWS else unit.op
        self.append(Operation(op, args, kwargs, results, operation.source), self.define)

    def append(self, operation: Operation, define: Callable[[Value, str], Value]) -> None:
        """Emit an operation with new results: for each old one, `define` makes the new value with a given name."""
        name = operator_name(operation.op)
        annotations = self.annotations
        if operation.returns_tuple:
            annotations = attrs.evolve(annotations, tuple_name=self.namer.numbered(name))
        results = tuple(
            None if value is None else define(value, self.namer.numbered(name)) for value in operation.results
        )
        self.operations.append(attrs.evolve(operation, results=results, annotations=annotations))

    def redistribute(self, operation: Operation) -> None:
        """Emit the steps from the operand's spec to the result's, each over physical dims where possible."""
        (value,), (result,) = operation.operands, operation.tensors
        here, atoms, cause = self.values[value], self.plan.logical[result], self.plan.causes[operation]
        plain = self.annotations
        for step in redistribution(self.plan.specs[value], self.plan.specs[result]):
            local = localize_step(step, atoms, self.coordinate)
            here = self.reshape(here, local.view)
            meta = TensorMeta(local.step.target.local_shape(self.coordinate), value.meta.dtype)
            if step.is_collective:
                self.annotations = attrs.evolve(plain, cause=cause.text, bytes=step.bytes)
            source = cause.source if step.is_collective else None
            arguments = local.step.arguments(self.coordinate)
            here = self.call(local.step.primitive, (here, *arguments), {}, meta, source)
            self.specs[here] = Layout(step.target, atoms)
            self.annotations = plain
        self.values[result] = here = self.reshape(here, self.local(result).shape)
        if here is not self.values[value]:
            self.specs[here] = self.plan.layout(result)

    def reshape(self, x: Value, shape: tuple[int, ...]) -> Value:
        if x.meta.shape == shape:
            return x
        view = self.call(RESHAPE, (x, list(shape)), {}, TensorMeta(shape, x.meta.dtype))
        if x in self.specs:
            self.specs[view] = self.specs[x]
        return view

    def inline_local_implementation(self, operation: Operation, body: Body, axes: tuple[str, ...]) -> None:
        unsharded = lambda value: TensorMeta(  # noqa: E731
            self.plan.layout(value).without(axes).shape(self.coordinate), value.meta.dtype
        )
        rule = find_rule(operation.op, self.rules)
        size_argument = None if rule is None else rule.size_argument
        traced = trace_local_call(
            LocalCall.of(body, axes, operation, self.plan.mesh, self.local, unsharded, size_argument)
        )
        graph = traced.graph
        operands = (self.values[value] for value in dict.fromkeys(operation.operands))
        here: dict[Value, Value] = dict(zip(graph.inputs, operands, strict=True))

        def define(value: Value, name: str) -> Value:
            here[value] = Value(name, value.meta)
            return here[value]

        for value, tensor in graph.constants:
            name = self.namer.numbered(f"{operator_name(operation.op)}_constant")
            self.constants.append((define(value, name), tensor))
        plain = self.annotations
        for inner in graph.operations:
            if inner.op in COLLECTIVES:
                cause = f"{operator_name(operation.op)} over a sharded dim"
                self.annotations = attrs.evolve(plain, cause=cause, bytes=self.bytes_sent(inner))
            op = RESHAPE if inner.op in _VIEWS else inner.op
            self.append(attrs.evolve(inner.substitute(here), op=op, source=operation.source), define)
            self.annotations = plain
        for result, local in zip(operation.results, traced.results, strict=True):
            if result is not None and local is not None:  # torch's meta kernels return gradients not asked for
                self.values[result] = here[local]
                if local not in graph.inputs:
                    self.specs[here[local]] = self.plan.layout(result)

    def bytes_sent(self, operation: Operation) -> float:
        """The most bytes that any rank sends in a collective of a local implementation."""
        operand, *rest, axes = operation.args
        counts = tuple(map(self.plan.mesh.axis_size, axes))
        return max_bytes_sent(COLLECTIVES[operation.op], counts, operand.meta.shape, operand.meta.dtype.itemsize, rest)


def _identifier(path: str) -> str:
    """A Python identifier from a path: `params_w` from `params['w']`."""
    name = re.sub(r"\W+", "_", path).strip("_")
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"arg_{name}"
