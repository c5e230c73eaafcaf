"""Liveness: the buffers that a rank reads and allocates, event by event, as it runs a plan.

The runtimes are eager, so every result that is not a view is a buffer of its own. Whether an operator returns a view is
found by running it on meta tensors with the strides of the rank's tensors: a reshape copies where strides require it.
The rank is the one at coordinate zero, which holds the largest shards. Not modelled are the temporaries inside kernels
and collectives, and results that lowering shares between the local implementations of several operations.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import attrs
import torch

from spmd.collectives.local import LOCALS, run_local
from spmd.collectives.primitives import COLLECTIVES, UNTYPED
from spmd.collectives.resharding import redistribution
from spmd.core.mesh import Mesh
from spmd.core.spec import TensorMeta
from spmd.ir.comm import StepKind
from spmd.ir.graph import Operation, Value, freeze, iterate_leaves, map_leaves
from spmd.ir.in_place import rewritable
from spmd.ir.list_schedule import Unit
from spmd.ir.markers import REDISTRIBUTE
from spmd.plan.data.plan import PlanData
from spmd.plan.local.calls import scheduled
from spmd.plan.local.fragments import RESHAPE, Fragments, Known
from spmd.rules.layouts import Need, lay_out

aten = torch.ops.aten

TO_PARTIAL = torch.ops.spmd.to_partial.default

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
class Collective:
    """What a rank communicates in one event.

    Args:
        kind: its kind.
        axes: the mesh axes.
        arguments: those of the primitive after its operand.
        operand, result: their local metas.
        is_contiguous: whether the operand is.
    """

    kind: StepKind
    axes: tuple[str, ...]
    arguments: tuple[Any, ...]
    operand: TensorMeta
    result: TensorMeta
    is_contiguous: bool


@attrs.frozen(eq=False)
class Event:
    """One operator that a rank runs for `operation`: it reads the buffers `reads` and allocates `writes`.

    `rewritable` has pairs of a buffer that it reads and one that it need not allocate if the other is not read later.
    `collective` says what it communicates, if it does; `is_view` whether it only makes a view.
    """

    operation: Operation
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    rewritable: tuple[tuple[Buffer, Buffer], ...] = ()
    collective: Collective | None = None
    is_view: bool = False


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


def record(plan: PlanData, known: Known | None = None) -> Liveness:
    """The liveness of the program of a plan; `known` is as in `Fragments`."""
    return _Recorder(plan, known).run()


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
    def __init__(self, plan: PlanData, known: Known | None) -> None:
        self.plan = plan
        self.fragments = Fragments(plan, (0,) * len(plan.mesh.names), known)
        self.events: list[Event] = []
        self.buffers: dict[Value, Buffer] = {}
        self.layouts: dict[Value, _Strided] = {}
        self.fills = self.sharded_constants()

    def run(self) -> Liveness:
        graph = self.plan.graph
        inputs = tuple(self.given(value) for value in graph.inputs)
        constants = tuple(self.given(value) for value, _ in graph.constants)
        for unit in scheduled(self.plan):
            self.unit(unit)
        outputs = tuple(self.buffers[value] for value in graph.outputs)
        found = Liveness(tuple(self.events), inputs, outputs, constants, self.buffers)
        return _written_in_place(found, self.plan.request.donated)

    def sharded_constants(self) -> frozenset[Value]:
        """Results of `aten.full` of which ranks only read shards: lowering creates these instead of the full tensor."""
        operations = self.plan.graph.operations
        made = {operation.tensors[0] for operation in operations if operation.op is aten.full.default}
        made.difference_update(self.plan.graph.outputs)
        for operation in operations if made else ():
            if not self.only_slices(operation):
                made.difference_update(operation.operands)
        return frozenset(made)

    def only_slices(self, operation: Operation) -> bool:
        """Whether an operation is a redistribution without communication."""
        if operation.op is not REDISTRIBUTE:
            return False
        (value,), (result,) = operation.operands, operation.tensors
        steps = redistribution(self.plan.specs[value], self.plan.specs[result])
        return all(step.kind is StepKind.SHARD for step in steps)

    def given(self, value: Value) -> Buffer:
        """The buffer of an input or a constant."""
        meta = self.fragments.local(value)
        return self.hold(value, _Strided.contiguous(meta), Buffer(value, meta))

    def hold(self, value: Value, layout: _Strided, buffer: Buffer) -> Buffer:
        self.layouts[value], self.buffers[value] = layout, buffer
        return buffer

    def event(
        self,
        operation: Operation,
        reads: Iterable[Buffer],
        writes: Iterable[Buffer],
        pairs: tuple[tuple[Buffer, Buffer], ...] = (),
        collective: Collective | None = None,
        *,
        is_view: bool = False,
    ) -> None:
        self.events.append(Event(operation, tuple(dict.fromkeys(reads)), tuple(writes), pairs, collective, is_view))

    def unit(self, unit: Unit) -> None:
        """Record the operations of a call's fragment."""
        first = unit.operations[0]
        fragment = self.fragments.of(unit)
        graph = fragment.graph
        results = [
            (value, local) for value, local in zip(unit.results, fragment.results, strict=True) if value and local
        ]
        if first.op is aten.full.default and first.tensors[0] in self.fills:
            ((value, local),) = results
            self.hold(value, _Strided.contiguous(local.meta), Buffer(value, TensorMeta((0,), local.meta.dtype)))
            self.event(first, [], [])
            return
        if first.op is REDISTRIBUTE and first.operands[0] in self.fills:
            self.event(first, [], [self.given(first.tensors[0])])
            return
        for local, value in zip(graph.inputs, unit.operands, strict=True):
            self.hold(local, self.layouts[value], self.buffers[value])
        for local, _ in graph.constants:
            self.hold(local, _Strided.contiguous(local.meta), Buffer(None, local.meta))
        named = {} if self.fragments.local_implementation(first) else {local: value for value, local in results}
        for operation in graph.operations:
            reads = self.operands(operation, first)
            writes = self.call(operation, named)
            pairs = tuple((self.buffers[a], self.buffers[b]) for a, b in rewritable(operation))
            pairs = tuple(pair for pair in pairs if pair[1] in writes)
            is_view = not writes and isinstance(operation.op, torch._ops.OpOverload) and operation.is_view
            self.event(first, reads, writes, pairs, self.collective(operation), is_view=is_view)
        for value, local in results:
            self.hold(value, self.layouts[local], self.buffers[local])

    def collective(self, operation: Operation) -> Collective | None:
        """What an operation of a fragment communicates."""
        op = UNTYPED.get(operation.op, operation.op)
        if op not in COLLECTIVES:
            return None
        operand, (result,) = operation.operands[0], operation.tensors
        *arguments, axes = operation.args[len(operation.operands) :]
        contiguous = self.layouts[operand].is_contiguous
        return Collective(COLLECTIVES[op], tuple(axes), tuple(arguments), operand.meta, result.meta, contiguous)

    def operands(self, operation: Operation, planned: Operation) -> list[Buffer]:
        """The buffers that an operator reads; an operand whose strides its kernel does not support is copied first."""
        needs: dict[Value, Need] = {}

        def note(leaf: Any, needed: Need) -> None:
            if isinstance(leaf, Value):
                needs[leaf] = needed

        lay_out(operation.op, operation.args, operation.kwargs, note)
        found = []
        for value in dict.fromkeys(operation.operands):
            buffer, layout = self.buffers[value], self.layouts[value]
            if value in needs and not needs[value].is_met(layout.tensor()):
                copy = Buffer(None, layout.meta)
                self.event(planned, [buffer], [copy])
                buffer = copy
            found.append(buffer)
        return found

    def call(self, operation: Operation, named: Mapping[Value, Value]) -> list[Buffer]:
        """The buffers that an operator allocates; `named` has the values of the plan for those that stand for one."""
        writes = []
        operands = operation.operands
        for value, result in zip(operation.tensors, self.results(operation), strict=True):
            if result.view_of is None:
                writes.append(self.hold(value, result.layout, Buffer(named.get(value), value.meta)))
            else:
                self.hold(value, result.layout, self.buffers[operands[result.view_of]])
        return writes

    def results(self, operation: Operation) -> tuple[_Result, ...]:
        operands = operation.operands
        metas = tuple(value.meta for value in operation.tensors)
        fresh = tuple(_Result(_Strided.contiguous(meta)) for meta in metas)
        if not operands or operation.effect is not None or operation.op is TO_PARTIAL:
            return fresh
        first = self.layouts[operands[0]]
        same = len(metas) == 1 and metas[0] == first.meta
        if same and (operation.op in _IDENTITIES or operation.op in (RESHAPE, aten.expand.default)):
            return (_Result(first, 0),)
        layouts = [self.layouts[value] for value in operands]
        if torch.Tag.pointwise in operation.op.tags and all(layout.is_contiguous for layout in layouts):
            return fresh
        numbers = iter(range(len(operands)))
        arguments = map_leaves(
            lambda leaf: _Operand(next(numbers)) if isinstance(leaf, Value) else leaf,
            (operation.args, dict(operation.kwargs)),
        )
        call = _Call(operation.op, freeze(arguments), tuple(layouts), metas, arguments)
        return _run_on_meta(call, self.plan.mesh if operation.op in LOCALS else None) or fresh


def _written_in_place(liveness: Liveness, donated: Collection[int]) -> Liveness:
    """The liveness with results in the memory of donated inputs, where lowering places them."""
    if not donated:
        return liveness
    writable = {liveness.inputs[position] for position in donated}
    last = {buffer: index for index, event in enumerate(liveness.events) for buffer in event.reads}
    outputs = set(liveness.outputs)
    merged: dict[Buffer, Buffer] = {}
    events = []
    for index, event in enumerate(liveness.events):
        for operand, result in event.rewritable:
            if operand not in outputs and last[operand] == index and merged.get(operand, operand) in writable:
                merged[result] = merged.get(operand, operand)
        reads = dict.fromkeys(merged.get(buffer, buffer) for buffer in event.reads)
        writes = tuple(buffer for buffer in event.writes if buffer not in merged)
        events.append(attrs.evolve(event, reads=tuple(reads), writes=writes))
    return Liveness(
        tuple(events),
        liveness.inputs,
        tuple(merged.get(buffer, buffer) for buffer in liveness.outputs),
        liveness.constants,
        {value: merged.get(buffer, buffer) for value, buffer in liveness.buffers.items()},
    )


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
def _run_on_meta(call: _Call, mesh: Mesh | None) -> tuple[_Result, ...] | None:
    """The strides of the results and which are views; None if the operator does not run on meta tensors.

    The mesh is that of a primitive without communication, which runs as on the first rank.
    """
    operands = [layout.tensor() for layout in call.operands]

    def concrete(leaf: Any) -> Any:
        if isinstance(leaf, _Operand):
            return operands[leaf.number]
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    args, kwargs = map_leaves(concrete, call.arguments)
    try:
        made = call.op(*args, **kwargs) if mesh is None else run_local(call.op, mesh, 0, *args)
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
