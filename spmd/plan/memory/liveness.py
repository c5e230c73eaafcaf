"""Liveness: the buffers that a rank reads and allocates, event by event, as it runs the program of a plan.

Which values are views is found as the runtimes have it (`spmd.lowering.passes.aliases`). A process holds what its
collectives send and receive, too, while these are under way. Not modelled are the temporaries inside kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import attrs

from spmd.core.mesh import Coordinate, Runtime
from spmd.core.spec import TensorMeta
from spmd.ir.dataflow import is_read_by_items
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.in_place import InPlace, rewritable, targets
from spmd.ir.regions import BEGINS, CARRY, END, MERGE, NEXT, STACK, STRUCTURE
from spmd.lowering.launches import Launch, Start, Wait, split_launches, with_records
from spmd.lowering.lower import build_rank_graph, rank_graph
from spmd.lowering.passes.aliases import Aliases
from spmd.plan.data.plan import PlanData
from spmd.plan.local.fragments import Known
from spmd.plan.memory.launch_buffers import Allocation, launch_buffers


@attrs.frozen(eq=False)
class Buffer:
    """One storage of a rank.

    Args:
        value: the value of the plan that it was allocated for; None for a temporary inside of an operation.
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
        buffers: the buffer of every value of the plan; views share that of their base.
    """

    events: tuple[Event, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    constants: tuple[Buffer, ...]
    buffers: dict[Value, Buffer]


def liveness_of(plan: PlanData, known: Known | None = None, coordinate: Coordinate | None = None) -> Liveness:
    """The liveness of the program of the rank at a coordinate, by default zero; `known` is as in `Fragments`."""
    coordinate = coordinate or (0,) * len(plan.mesh.names)
    graph = rank_graph(plan, coordinate) if known is None else build_rank_graph(plan, coordinate, known=known)
    if plan.mesh.runtime is Runtime.DISTRIBUTED and plan.schedule is not None:
        graph = split_launches(with_records(graph, plan.comms), plan.schedule.window_bytes)
    return _Recorder(plan, graph, coordinate).run()


class _Recorder:
    """The events so far."""

    def __init__(self, plan: PlanData, graph: Graph, coordinate: Coordinate) -> None:
        self.plan, self.graph, self.coordinate = plan, graph, coordinate
        self.aliases = Aliases(graph, (plan.mesh, plan.mesh.rank(coordinate)))
        planned = (*graph.planned.items(), *zip(plan.graph.outputs, graph.outputs, strict=True))
        values = {local: value for value, local in reversed(planned)}
        self.memory = {base: Buffer(values.get(base), base.meta) for base in dict.fromkeys(self.aliases.bases.values())}
        """The buffer of each value that is no view."""
        self.parts: dict[Value, Buffer] = {}
        """For results of collectives that are views of a bucket, the buffer of a copy."""
        self.waits: dict[Launch, Callable[[Operation], None]] = {}
        self.events: list[Event] = []

    def run(self) -> Liveness:
        """The liveness of the program."""
        graph = self.graph
        self.write_in_place()
        for operation in graph.operations:
            self.record(operation)
        inputs, constants = self.buffers(graph.inputs), self.buffers([value for value, _ in graph.constants])
        return Liveness(tuple(self.events), inputs, self.results(), constants, self.planned())

    def buffers(self, values: Iterable[Value]) -> tuple[Buffer, ...]:
        """The buffers of values."""
        return tuple(self.memory[self.aliases.bases[value]] for value in values)

    def event(self, operation: Operation, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        """Record an event of an operation of the rank."""
        assert operation.annotations.origin is not None, "every operation runs for one of the plan"
        self.events.append(Event(operation.annotations.origin, tuple(dict.fromkeys(reads)), tuple(writes)))

    def record(self, operation: Operation) -> None:
        """Record what an operation reads and allocates."""
        if isinstance(operation.op, Start):
            self.launch(operation, operation.op.launch)
        elif isinstance(operation.op, Wait):
            self.waits.pop(operation.op.launch)(operation)
        elif operation.annotations.comm is not None and self.plan.mesh.runtime is Runtime.DISTRIBUTED:
            # One call does all of it, and its caller holds the operands until it returns.
            launch = Launch((operation,))
            self.launch(operation, launch, self.buffers(launch.operands))
            self.waits.pop(launch)(operation)
        elif operation.op in STRUCTURE:
            self.record_statement(operation)
        else:
            reads = self.buffers(operation.operands)
            owned = self.buffers(value for value in operation.tensors if self.aliases.bases[value] is value)
            self.event(operation, reads, (buffer for buffer in owned if buffer not in reads))

    def record_statement(self, operation: Operation) -> None:
        """Record what a loop holds: carries and stacks from its beginning, what it reads or leaves until its end."""
        regions = self.graph.regions
        own = (NEXT, STACK, CARRY)
        reads = [] if operation.op in own else list(operation.operands)
        writes: list[Value] = list(operation.tensors) if operation.op is MERGE else []
        if operation.op in BEGINS:
            members = regions.members(operation, CARRY, STACK)
            writes += [member.tensors[0] for member in members]
            reads += [member.operands[0] for member in members if member.op is CARRY]
        if operation.op is END:
            reads += self.held_until[operation]
        made = self.buffers(writes)
        self.event(operation, self.buffers(reads), made)
        if operation.op is END:  # what trips have made is joined
            begin = self.graph.producers[operation.operands[0]]
            for member in regions.members(begin, STACK):
                (stack,) = member.tensors
                if not is_read_by_items(self.graph, stack):
                    self.event(operation, self.buffers([stack]), (Buffer(None, stack.meta),))

    @cached_property
    def held_until(self) -> dict[Operation, list[Value]]:
        """What each region reads of what is around it, and leaves."""
        found: dict[Operation, list[Value]] = defaultdict(list)
        for operation in self.graph.operations:
            for value in operation.operands:
                found[self.graph.regions.held_until(operation, value)].append(value)
        return found

    def launch(self, operation: Operation, launch: Launch, held: Sequence[Buffer] = ()) -> None:
        """Record the start of a launch; what is `held` is held until its end."""
        calls = tuple(map(self.aliases.call, launch.collectives))
        found = launch_buffers(self.plan.mesh, ranks_like(self.plan, self.coordinate), calls)
        operands = self.buffers(launch.operands)
        buffers = dict(enumerate(operands))
        for number, result in zip(found.results, launch.results, strict=True):
            if found.results.count(number) == 1:
                buffers[number] = self.memory[result]
            else:
                self.parts[result] = self.memory[result]
                self.memory[result] = buffers.setdefault(number, Buffer(None, found.metas[number]))
        for number, meta in enumerate(found.metas):
            buffers.setdefault(number, Buffer(None, meta))
        sent, received = buffers[found.sent], buffers[found.received]

        def allocate(operation: Operation, held: Sequence[Buffer], allocations: Iterable[Allocation]) -> None:
            for reads, writes in allocations:
                self.event(operation, (*held, *map(buffers.__getitem__, reads)), map(buffers.__getitem__, writes))

        def wait(operation: Operation) -> None:
            self.event(operation, (*([sent] if found.holds_sent else []), *held, received), ())
            allocate(operation, [received, *held], found.unpacking)

        allocate(operation, operands, found.packing)
        self.event(operation, (*operands, sent), {received} - {sent})
        self.waits[launch] = wait

    def results(self) -> tuple[Buffer, ...]:
        """The buffers of the results, which are no views of a bucket: they would hold it as a whole."""
        bases = [self.aliases.bases[value] for value in self.graph.outputs]
        views = [base for base in dict.fromkeys(bases) if base in self.parts]
        if views:
            reads, writes = (tuple(map(of.__getitem__, views)) for of in (self.memory, self.parts))
            self.events.append(Event(self.events[-1].operation, reads, writes))
        return tuple(self.parts.get(base) or self.memory[base] for base in bases)

    def write_in_place(self) -> None:
        """Give results that operators write into the memory of operands the buffers of these."""
        bases, operations = self.aliases.bases, self.graph.operations
        last = {bases[value]: operation for operation in operations for value in operation.operands}
        kept = {bases[value] for value in self.graph.outputs}
        for operation in operations:
            for operand, result in _rewritten(operation):
                base = bases[operand]
                if self.aliases.is_whole(operand) and last[base] is operation and base not in kept:
                    self.memory[result] = self.memory[base]

    def planned(self) -> dict[Value, Buffer]:
        """The buffers of the plan's values. Views that lowering removes are of their operand, other values empty."""
        bases = self.aliases.bases
        found = {v: self.memory[bases[local]] for v, local in self.graph.planned.items() if local in bases}
        for operation in self.plan.graph.operations:
            for value in operation.tensors:
                if value not in found and operation.is_view:
                    found[value] = found[operation.operands[0]]
                elif value not in found:
                    found[value] = Buffer(value, TensorMeta((0,), value.meta.dtype))
        return found


def _rewritten(operation: Operation) -> Iterator[tuple[Value, Value]]:
    """Pairs of an operand and the result that the program permits the operator to write into its memory."""
    if isinstance(operation.op, InPlace):
        functional = attrs.evolve(operation, op=operation.op.op)
        free = dict(zip(targets(functional), operation.op.free, strict=True))
        yield from (pair for pair in rewritable(functional) if free[pair[0]])


def ranks_like(plan: PlanData, coordinate: Coordinate) -> tuple[Coordinate, ...]:
    """The ranks that share the program of that at a coordinate, which comes first."""
    variants, others = plan.request.graph.variants, [other for other in plan.mesh.coordinates() if other != coordinate]
    if variants is not None:
        key = variants.unevenness.key
        others = [other for other in others if key(other) == key(coordinate)]
    return (coordinate, *others)
