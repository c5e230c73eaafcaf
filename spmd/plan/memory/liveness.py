"""Liveness: the buffers that a rank reads and allocates, event by event, as it runs a plan.

The runtimes are eager, so every result that is not a view is a buffer of its own. Whether an operator returns a view is
found by running it on meta tensors with the strides of the rank's tensors: a reshape copies where strides require it.
The rank is the one at coordinate zero, which holds the largest shards. Not modelled are the temporaries inside kernels
and collectives, and results that lowering shares between the local implementations of several operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch

from spmd.collectives.resharding import Step, StepKind, redistribution
from spmd.core.mesh import Mesh
from spmd.core.spec import TensorMeta
from spmd.ir.graph import Graph, Operation, Value, freeze, iterate_leaves, map_leaves
from spmd.ir.list_schedule import Unit, schedule
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.plan.data.layout import Layout
from spmd.plan.data.local_calls import (
    LocalCall,
    local_implementation,
    runs_local_implementation,
    trace_local_call,
    with_local_size,
)
from spmd.rules import find_rule
from spmd.rules.layouts import Need, lay_out
from spmd.rules.rule import Rule
from spmd.rules.strategy import Strategy

aten = torch.ops.aten

_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default})
"""Operators that lowering removes, because a functional program needs no copies."""


@attrs.frozen(eq=False)
class Buffer:
    """One storage of a rank.

    Args:
        value: the value that it was allocated for; None for a temporary inside a redistribution or a local
            implementation.
        meta: shape and dtype on the rank.
    """

    value: Value | None
    meta: TensorMeta

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.meta.nbytes


@attrs.frozen(eq=False)
class Event:
    """One operator that a rank runs for `operation`: it reads the buffers `reads` and allocates `writes`."""

    operation: Operation
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]


@attrs.frozen(eq=False)
class Liveness:
    """The events of one run of a program, and its buffers.

    Args:
        events: in order of execution.
        inputs, outputs: the buffers of the program's arguments and results; a result may be an argument.
        constants: the buffers of the tensors that the program closed over.
        buffers: the buffer of every value; views share that of their base.
    """

    events: tuple[Event, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    constants: tuple[Buffer, ...]
    buffers: dict[Value, Buffer]


def record(
    graph: Graph,
    mesh: Mesh,
    layout: Callable[[Value], Layout],
    strategies: Mapping[Operation, Mapping[str, Strategy]],
    rules: Mapping[torch._ops.OpOverload, Rule],
) -> Liveness:
    """The liveness of a planned program.

    Args:
        graph: the program, with redistributions as explicit operations.
        mesh: the mesh.
        layout: the layout of each value.
        strategies: the strategies of every operation, by mesh axis.
        rules: the sharding rules.
    """
    return _Recorder(graph, mesh, layout, strategies, rules).run()


@attrs.frozen
class _Strided:
    """The properties of a local tensor that decide whether an operator returns a view of it."""

    meta: TensorMeta
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, meta: TensorMeta) -> _Strided:
        strides = [1]
        for size in reversed(meta.shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        return cls(meta, tuple(reversed(strides)) if meta.shape else ())

    @property
    def is_contiguous(self) -> bool:
        """Whether elements are in row-major order without gaps; strides of dims of length 1 do not matter."""
        expected = _Strided.contiguous(self.meta).strides
        dims = zip(self.meta.shape, self.strides, expected, strict=True)
        return self.meta.numel < 2 or all(size == 1 or stride == other for size, stride, other in dims)

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.meta.shape, self.strides, dtype=self.meta.dtype, device="meta")


@attrs.frozen
class _Result:
    """A result of an operator: its strides, and the position of the operand that it is a view of, if it is one."""

    layout: _Strided
    view_of: int | None = None


class _Recorder:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        layout: Callable[[Value], Layout],
        strategies: Mapping[Operation, Mapping[str, Strategy]],
        rules: Mapping[torch._ops.OpOverload, Rule],
    ) -> None:
        self.graph, self.mesh, self.layout, self.strategies, self.rules = graph, mesh, layout, strategies, rules
        self.zero = (0,) * len(mesh.names)
        self.events: list[Event] = []
        self.buffers: dict[Value, Buffer] = {}
        self.layouts: dict[Value, _Strided] = {}
        self.inside: set[Value] = set()  # values inside local implementations

        self.fills = self.sharded_constants()

    def run(self) -> Liveness:
        graph = self.graph
        inputs = tuple(self.allocate(value) for value in graph.inputs)
        constants = tuple(self.allocate(value) for value, _ in graph.constants)
        for unit in schedule(graph.operations, frozenset(filter(self.runs_local_implementation, graph.operations))):
            self.unit(unit)
        outputs = tuple(self.buffers[value] for value in graph.outputs)
        return Liveness(tuple(self.events), inputs, outputs, constants, self.buffers)

    def sharded_constants(self) -> frozenset[Value]:
        """Results of `aten.full` of which ranks only read shards: lowering creates these instead of the full tensor."""
        made = {operation.tensors[0] for operation in self.graph.operations if operation.op is aten.full.default}
        made.difference_update(self.graph.outputs)
        for operation in self.graph.operations if made else ():
            if not self.cuts(operation):
                made.difference_update(operation.operands)
        return frozenset(made)

    def cuts(self, operation: Operation) -> bool:
        """Whether an operation is a redistribution that only slices, without communication."""
        if operation.op is not REDISTRIBUTE:
            return False
        (value,), (result,) = operation.operands, operation.tensors
        steps = redistribution(self.layout(value).spec, self.layout(result).spec)
        return all(step.kind is StepKind.SHARD for step in steps)

    def runs_local_implementation(self, operation: Operation) -> bool:
        return runs_local_implementation(operation, self.strategies.get(operation, {}), self.rules)

    def local(self, value: Value, without: Sequence[str] = ()) -> TensorMeta:
        if value in self.inside:
            return value.meta
        layout = self.layout(value)
        return TensorMeta((layout.without(without) if without else layout).shape(self.zero), value.meta.dtype)

    def allocate(self, value: Value, layout: _Strided | None = None) -> Buffer:
        self.layouts[value] = layout or _Strided.contiguous(self.local(value))
        self.buffers[value] = Buffer(None if value in self.inside else value, self.layouts[value].meta)
        return self.buffers[value]

    def alias(self, value: Value, other: Value, layout: _Strided) -> None:
        self.layouts[value], self.buffers[value] = layout, self.buffers[other]

    def event(self, operation: Operation, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        self.events.append(Event(operation, tuple(dict.fromkeys(reads)), tuple(writes)))

    def unit(self, unit: Unit) -> None:
        operation = unit.operations[0]
        if operation.op is RELABEL:
            (value,), (result,) = operation.operands, operation.tensors
            self.alias(result, value, self.layouts[value])
        elif operation.op is REDISTRIBUTE:
            self.redistribute(operation)
        elif local_implementation(self.strategies.get(operation, {})) is not None:
            self.body(operation)
        else:
            reads = [buffer for member in unit.operations for buffer in self.operands(member)]
            writes = [buffer for member in unit.operations for buffer in self.call(member)]
            self.event(operation, reads, writes)

    def operands(self, operation: Operation) -> list[Buffer]:
        """The buffers that an operator reads; an operand whose strides its kernel does not support is copied first."""
        needs: dict[Value, Need] = {}

        def note(leaf: Any, needed: Need) -> None:
            if isinstance(leaf, Value):
                needs[leaf] = needed

        if operation.op is not aten.view.default:  # lowering reshapes
            lay_out(operation.op, operation.args, operation.kwargs, note)
        found = []
        for value in dict.fromkeys(operation.operands):
            buffer, layout = self.buffers[value], self.layouts[value]
            if not needs.get(value, Need.ANY).is_met(layout.tensor()):
                copy = Buffer(None, layout.meta)
                self.event(operation, [buffer], [copy])
                buffer = copy
            found.append(buffer)
        return found

    def call(self, operation: Operation) -> list[Buffer]:
        """The buffers that an operator allocates when it runs on local tensors."""
        writes = []
        operands = operation.operands
        for value, result in zip(operation.tensors, self.results(operation), strict=True):
            if value in self.fills:
                self.layouts[value], self.buffers[value] = (
                    result.layout,
                    Buffer(value, TensorMeta((0,), value.meta.dtype)),
                )
            elif result.view_of is None:
                writes.append(self.allocate(value, result.layout))
            else:
                self.alias(value, operands[result.view_of], result.layout)
        return writes

    def results(self, operation: Operation) -> tuple[_Result, ...]:
        operands = operation.operands
        metas = tuple(map(self.local, operation.tensors))
        fresh = tuple(_Result(_Strided.contiguous(meta)) for meta in metas)
        if not operands:
            return fresh
        first = self.layouts[operands[0]]
        same = len(metas) == 1 and metas[0] == first.meta
        if same and (operation.op in _IDENTITIES or operation.op in (aten.view.default, aten.expand.default)):
            return (_Result(first, 0),)
        layouts = [self.layouts[value] for value in operands]
        if torch.Tag.pointwise in operation.op.tags and all(layout.is_contiguous for layout in layouts):
            return fresh
        numbers = iter(range(len(operands)))
        arguments = map_leaves(
            lambda leaf: _Operand(next(numbers)) if isinstance(leaf, Value) else leaf,
            (operation.args, dict(operation.kwargs)),
        )
        rule = find_rule(operation.op, self.rules)
        if rule is not None and rule.size_argument is not None:
            arguments = (with_local_size(arguments[0], rule.size_argument, metas[0].shape), arguments[1])
        call = _Call(operation.op, freeze(arguments), tuple(layouts), metas, arguments)
        return _run_on_meta(call) or fresh

    def redistribute(self, operation: Operation) -> None:
        """Record the events of every step of a redistribution; the buffer of the last step is that of the result."""
        (value,), (result,) = operation.operands, operation.tensors
        if value in self.fills:
            self.event(operation, [], [self.allocate(result)])
            return
        buffer, contiguous = self.buffers[value], self.layouts[value].is_contiguous
        for step in redistribution(self.layout(value).spec, self.layout(result).spec):
            before = buffer
            if not (contiguous and self.is_view(step)):
                shape = step.target.local_shape(self.zero)
                buffer = Buffer(None, TensorMeta(shape, value.meta.dtype))
            contiguous = True
            self.event(operation, [before], [] if buffer is before else [buffer])
        layout = _Strided.contiguous(self.local(result))
        if buffer is self.buffers[value]:
            self.alias(result, value, layout)
            return
        event = self.events.pop()
        made = self.allocate(result, layout)
        self.event(operation, event.reads, [made] if event.writes else [])

    def is_view(self, step: Step) -> bool:
        """Whether a step on a contiguous tensor is a view of it: a slice along the leading dim that is not 1."""
        leading = step.source.local_shape(self.zero)[: step.dims[0]] if step.dims else ()
        return step.kind is StepKind.SHARD and math.prod(leading) == 1

    def body(self, operation: Operation) -> None:
        """Record the events of the operators in a local implementation, traced on contiguous tensors."""
        found = local_implementation(self.strategies[operation])
        assert found is not None
        body, axes = found
        rule = find_rule(operation.op, self.rules)
        size_argument = None if rule is None else rule.size_argument
        unsharded = lambda value: self.local(value, axes)  # noqa: E731
        traced = trace_local_call(LocalCall.of(body, axes, operation, self.mesh, self.local, unsharded, size_argument))
        graph = traced.graph
        for inner_value, operand in zip(graph.inputs, dict.fromkeys(operation.operands), strict=True):
            self.layouts[inner_value] = _Strided.contiguous(inner_value.meta)
            self.buffers[inner_value] = self.buffers[operand]
        for inner_value, _ in graph.constants:
            self.layouts[inner_value] = _Strided.contiguous(inner_value.meta)
            self.buffers[inner_value] = Buffer(None, inner_value.meta)
        self.inside.update(value for inner in graph.operations for value in inner.tensors)
        for inner in graph.operations:
            self.event(operation, [self.buffers[value] for value in inner.operands], self.call(inner))
        for value, result in zip(operation.results, traced.results, strict=True):
            if value is not None and result is not None:
                self.layouts[value] = _Strided.contiguous(self.local(value))
                self.buffers[value] = self.buffers[result]


@attrs.frozen
class _Operand:
    number: int


@attrs.frozen
class _Call:
    """A call on local tensors, as a cache key: equal calls have results with equal strides and views."""

    op: torch._ops.OpOverload
    key: Hashable
    operands: tuple[_Strided, ...]
    results: tuple[TensorMeta, ...]
    arguments: Any = attrs.field(eq=False)


@lru_cache(maxsize=16384)
def _run_on_meta(call: _Call) -> tuple[_Result, ...] | None:
    """The strides of the results and which are views; None if the operator does not run on meta tensors."""
    operands = [layout.tensor() for layout in call.operands]

    def concrete(leaf: Any) -> Any:
        if isinstance(leaf, _Operand):
            return operands[leaf.number]
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    args, kwargs = map_leaves(concrete, call.arguments)
    try:
        made = args[0].reshape(args[1]) if call.op is aten.view.default else call.op(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return None
    tensors = [leaf for leaf in iterate_leaves(made) if leaf is not None]
    if [TensorMeta.of(tensor) for tensor in tensors] != list(call.results):
        return None
    storages = [_storage(tensor) for tensor in operands]
    return tuple(
        _Result(
            _Strided(meta, tensor.stride()), storages.index(_storage(tensor)) if _storage(tensor) in storages else None
        )
        for tensor, meta in zip(tensors, call.results, strict=True)
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
