"""Liveness: the buffers that a rank reads and allocates, event by event, as it runs a plan.

The runtimes are eager, so every result that is not a view is a buffer of its own. Whether an operator returns a view is
found by running it on meta tensors with the strides of the rank's tensors: a reshape copies where strides require it.
Operators that lowering merges run once. Not modelled are the temporaries inside kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from spmd.collectives.local import LOCALS
from spmd.collectives.primitives import COLLECTIVES
from spmd.collectives.resharding import only_slices
from spmd.core.mesh import Coordinate
from spmd.core.spec import TensorMeta
from spmd.ir.graph import Operation, Value, freeze
from spmd.ir.in_place import rewritable
from spmd.ir.list_schedule import Unit
from spmd.ir.markers import REDISTRIBUTE
from spmd.plan.data.plan import PlanData
from spmd.plan.local.calls import scheduled
from spmd.plan.local.fragments import Fragments, Known
from spmd.plan.local.partial_views import partial_views
from spmd.plan.local.strided import Result, Strided, StridedCall, results_of
from spmd.plan.memory.repetitions import repetitions
from spmd.rules.layouts import Need, lay_out

aten = torch.ops.aten

SHARD = torch.ops.spmd.shard.default


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
    """One operator that a rank runs for `operation`: it reads the buffers `reads` and allocates `writes`.

    `rewritable` has pairs of a buffer that it reads and one that it need not allocate if the other is not read later.
    `collective` is its call if ranks communicate in it; `is_view` says whether it only makes a view.
    """

    operation: Operation
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    rewritable: tuple[tuple[Buffer, Buffer], ...] = ()
    collective: StridedCall | None = None
    is_view: bool = False


@attrs.frozen(eq=False)
class Liveness:
    """The events of one run of a program, and its buffers.

    Args:
        events: in order of execution.
        inputs, outputs: the buffers of the program's arguments and results; a result may be an argument.
        constants: the buffers of the tensors that the program closed over.
        buffers: the buffer of every value; views share that of their base.
        coordinate: the mesh coordinate of the rank.
    """

    events: tuple[Event, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    constants: tuple[Buffer, ...]
    buffers: dict[Value, Buffer]
    coordinate: Coordinate


def record(plan: PlanData, known: Known | None = None, coordinate: Coordinate | None = None) -> Liveness:
    """The liveness of the program of the rank at a coordinate, by default zero; `known` is as in `Fragments`."""
    return _Recorder(plan, known, coordinate or (0,) * len(plan.mesh.names)).run()


class _Recorder:
    def __init__(self, plan: PlanData, known: Known | None, coordinate: Coordinate) -> None:
        self.plan = plan
        self.fragments = Fragments(plan, coordinate, known)
        self.events: list[Event] = []
        self.values: dict[Value, Value] = {}
        """The local tensor of each value of the plan."""
        self.made: dict[Hashable, tuple[Value, ...]] = {}
        """The results of operators without effects."""
        self.copies: dict[tuple[Value, Need], Buffer] = {}
        self.buffers: dict[Value, Buffer] = {}
        self.layouts: dict[Value, Strided] = {}
        self.slices: set[Value] = set()
        """The values that reshards have sliced, and views of them."""
        self.repetitions = repetitions(plan.graph, plan.specs)
        self.fills = self.sharded_constants()

    def run(self) -> Liveness:
        graph = self.plan.graph
        inputs = tuple(self.given(value) for value in graph.inputs)
        constants = tuple(self.given(value) for value, _ in graph.constants)
        for unit in scheduled(self.plan):
            self.unit(unit)
        buffers = {value: self.buffers[same] for value, same in self.values.items()}
        copies = self.copied_results(inputs)
        outputs = tuple(copies.get(self.values[value], buffers[value]) for value in graph.outputs)
        found = Liveness(tuple(self.events), inputs, outputs, constants, buffers, self.fragments.coordinate)
        return _written_in_place(found, self.plan.request.donated)

    def copied_results(self, inputs: Sequence[Buffer]) -> dict[Value, Buffer]:
        """Record the copies of results that would keep larger tensors alive, as lowering makes them."""
        donated = self.plan.request.donated
        kept = {buffer for position, buffer in enumerate(inputs) if position not in donated}
        results = {self.values[value]: value for value in self.plan.graph.outputs}
        found = partial_views(results, self.buffers.__getitem__, lambda buffer: buffer.nbytes, kept, self.slices)
        last = {buffer: index for index, event in enumerate(self.events) for buffer in event.reads}
        made = {local: Buffer(results[local], local.meta) for views in found.values() for local in views}
        for base in sorted(found, key=last.__getitem__, reverse=True):
            copies = tuple(map(made.__getitem__, found[base]))
            self.events.insert(last[base] + 1, Event(self.events[last[base]].operation, (base,), copies))
        return made

    def sharded_constants(self) -> frozenset[Value]:
        """Results of `aten.full` of which ranks only read shards: lowering creates these instead of the full tensor."""
        operations = self.plan.graph.operations
        made = {operation.tensors[0] for operation in operations if operation.op is aten.full.default}
        made.difference_update(self.plan.graph.outputs)
        for operation in operations if made else ():
            specs = [self.plan.specs[value] for value in (*operation.operands[:1], *operation.tensors[:1])]
            if operation.op is not REDISTRIBUTE or not only_slices(*specs):
                made.difference_update(operation.operands)
        return frozenset(made)

    def given(self, value: Value) -> Buffer:
        """The buffer of an input or a constant."""
        meta = self.fragments.local(value)
        self.values[value] = Value(value.name, meta)
        return self.hold(self.values[value], Strided.contiguous(meta), Buffer(value, meta))

    def hold(self, value: Value, layout: Strided, buffer: Buffer) -> Buffer:
        self.layouts[value], self.buffers[value] = layout, buffer
        return buffer

    def event(
        self,
        operation: Operation,
        reads: Iterable[Buffer],
        writes: Iterable[Buffer],
        pairs: tuple[tuple[Buffer, Buffer], ...] = (),
        collective: StridedCall | None = None,
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
            self.values[value] = local
            self.hold(local, Strided.contiguous(local.meta), Buffer(value, TensorMeta((0,), local.meta.dtype)))
            self.event(first, [], [])
            return
        if first.op is REDISTRIBUTE and first.operands[0] in self.fills:
            self.event(first, [], [self.given(first.tensors[0])])
            return
        here = {local: self.values[value] for local, value in zip(graph.inputs, unit.operands, strict=True)}
        for local, _ in graph.constants:
            here[local] = Value(local.name, local.meta)
            self.hold(here[local], Strided.contiguous(local.meta), Buffer(None, local.meta))
        named = {} if self.fragments.local_implementation(first) else {local: value for value, local in results}
        for operation in graph.operations:
            placed = operation.substitute(here)
            key = (operation.op, freeze(placed.args), freeze(dict(placed.kwargs)), self.repetitions.get(first, 0))
            if operation.effect is not None or key not in self.made:
                new = {value: Value(value.name, value.meta) for value in operation.tensors}
                placed = attrs.evolve(placed, results=tuple(value and new[value] for value in operation.results))
                self.operation(placed, first, {new[local]: named[local] for local in new.keys() & named.keys()})
                self.made[key] = placed.tensors
            here.update(zip(operation.tensors, self.made[key], strict=True))
        self.values.update((value, here[local]) for value, local in results)

    def operation(self, operation: Operation, planned: Operation, named: Mapping[Value, Value]) -> None:
        """Record what a rank runs for a planned operation; `named` has the results that are values of the plan."""
        reads = self.operands(operation, planned)
        writes = self.call(operation, named)
        pairs = tuple((self.buffers[a], self.buffers[b]) for a, b in rewritable(operation) if self.is_whole(a))
        pairs = tuple(pair for pair in pairs if pair[1] in writes)
        is_view = not writes and isinstance(operation.op, torch._ops.OpOverload) and operation.is_view
        collective = self.strided(operation) if operation.op in COLLECTIVES else None
        self.event(planned, reads, writes, pairs, collective, is_view=is_view)

    def is_whole(self, value: Value) -> bool:
        """Whether a value is all of its buffer, in row-major order, so that an operator may write to it."""
        return self.layouts[value].is_contiguous and self.buffers[value].nbytes == value.meta.nbytes

    def strided(self, operation: Operation) -> StridedCall:
        """The call of an operation on this rank's tensors."""
        return StridedCall.of(operation, [self.layouts[value] for value in operation.operands])

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
                key = value, needs[value]
                if key not in self.copies:
                    self.copies[key] = Buffer(None, layout.meta)
                    self.event(planned, [buffer], [self.copies[key]])
                buffer = self.copies[key]
            found.append(buffer)
        return found

    def call(self, operation: Operation, named: Mapping[Value, Value]) -> list[Buffer]:
        """The buffers that an operator allocates; `named` is as in `operation`."""
        writes = []
        operands = operation.operands
        for value, result in zip(operation.tensors, self.results(operation), strict=True):
            viewed = None if result.view_of is None else operands[result.view_of]
            if operation.op is SHARD or viewed in self.slices:
                self.slices.add(value)
            if viewed is None:
                writes.append(self.hold(value, result.layout, Buffer(named.get(value), value.meta)))
            else:
                self.hold(value, result.layout, self.buffers[viewed])
        return writes

    def results(self, operation: Operation) -> tuple[Result, ...]:
        place = (self.plan.mesh, self.plan.mesh.rank(self.fragments.coordinate)) if operation.op in LOCALS else None
        return results_of(operation, self.layouts, place)


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
        liveness.coordinate,
    )
