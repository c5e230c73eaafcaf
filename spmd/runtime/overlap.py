"""A rank's graph for torch.distributed: collectives overlap with computation.

Every launch becomes two calls: one starts it, one waits for its results (finish). The collectives of one launch are
joined to a bucket. Launches start in the order of the plan, the same on all ranks, although their programs differ in
views that are identities on some ranks; where each starts, `spmd.ir.launch_schedule` says. A finish stands before the
first use of a result, and so do views of results, because they wait for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs
import torch

from spmd.collectives.distributed.bucket import Bucket
from spmd.collectives.distributed.exchange import bind
from spmd.collectives.distributed.printer import Printer
from spmd.collectives.host import HOST_PRINT
from spmd.collectives.transport.exchange import Exchange
from spmd.collectives.transport.ragged_exchange import RaggedExchange
from spmd.core.mesh import Coordinate, Mesh
from spmd.ir.comm import Comm
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.launch_schedule import Call, Launch, LaunchSchedule, placed, starts
from spmd.lowering.program import is_primitive

EXCHANGES = (Exchange, RaggedExchange, Bucket)
"""What a rank does for a collective: it can be started, and finished later."""


def overlap(graph: Graph, mesh: Mesh, coordinate: Coordinate, schedule: LaunchSchedule | None) -> Graph:
    """Split the collectives of a rank's program into starts and finishes.

    Args:
        graph: the program.
        mesh: a distributed mesh.
        coordinate: the mesh coordinate of this process's rank.
        schedule: how collectives are launched; None if each is waited for where it stands, instead.

    Returns:
        A program in which every primitive is bound to what this rank does for it.
    """
    bound = attrs.evolve(graph, operations=tuple(_bind(operation, mesh, coordinate) for operation in graph.operations))
    return bound if schedule is None else split_exchanges(bound, schedule.window_bytes)


def _bind(operation: Operation, mesh: Mesh, coordinate: Coordinate) -> Operation:
    """A primitive as this rank's implementation of it, with all arguments but the operand bound."""
    if not is_primitive(operation):
        return operation
    operands = operation.operands
    if operation.op is HOST_PRINT:
        values, pieces = operation.args
        return attrs.evolve(operation, op=Printer(mesh, coordinate, tuple(pieces)), args=tuple(values))
    comm, source = operation.annotations.comm, operation.source
    cause = f"{comm.cause if comm else ''}{f' at {source}' if source else ''}"
    meta = operands[0].meta if operands else None
    bound = bind(operation.op, mesh, coordinate, meta, tuple(operation.args[len(operands) :]), cause)
    return attrs.evolve(operation, op=bound, args=operands)


def split_exchanges(graph: Graph, window_bytes: float) -> Graph:
    """A program in which every launch of `EXCHANGES` is split into a start and, later, a finish."""
    return attrs.evolve(graph, operations=tuple(_Overlap(graph, window_bytes).run())).verify()


class _Overlap:
    """The operations so far. Those that wait for a collective are added when they are needed."""

    def __init__(self, graph: Graph, window_bytes: float) -> None:
        self.graph = graph
        self.producers = graph.producers
        launches = _launches(graph)
        self.launches = [_joined(found) for found in launches]
        self.launch_of = {value: n for n, operation in enumerate(self.launches) for value in operation.tensors}
        self.starts: dict[int, int] = {}
        """The number of the last launch that starts at each position."""
        for number, position in enumerate(starts(_placed(graph, launches), window_bytes)):
            self.starts[position] = number
        self.pending: dict[int, Value] = {}
        """What the launches that are under way are waited for by."""
        self.started = 0
        self.effects = [operation for operation in graph.operations if operation.effect is not None]
        self.operations: list[Operation] = []
        self.made = {*graph.inputs, *(value for value, _ in graph.constants)}

    def run(self) -> list[Operation]:
        """All operations in their new order."""
        for position, operation in enumerate(self.graph.operations):
            self.start(self.starts.get(position, -1))
            if not isinstance(operation.op, EXCHANGES) and not self.is_view_of_result(operation):
                self.add(operation)
        self.start(len(self.launches) - 1)
        for operation in self.graph.operations:
            self.make(operation.tensors)
        return self.operations

    def is_view_of_result(self, operation: Operation) -> bool:
        """Whether it is a view of a result that is not there, or of such a view."""
        return _is_view(operation) and not self.made.issuperset(operation.operands)

    def make(self, values: Iterable[Value]) -> None:
        """Add what makes values, unless they are there."""
        for value in values:
            if value in self.made:
                continue
            if value in self.launch_of:
                self.finish(self.launch_of[value])
            else:
                self.add(self.producers[value])

    def add(self, operation: Operation) -> None:
        """Add an operation and what it needs, unless it is there."""
        if operation.tensors and self.made.issuperset(operation.tensors):
            return
        if operation.effect is not None:  # in the order of the program, as random numbers are drawn
            for earlier in self.effects[: self.effects.index(operation)]:
                self.add(earlier)
        self.make(operation.operands)
        self.operations.append(operation)
        self.made.update(operation.tensors)

    def start(self, last: int) -> None:
        """Start all launches up to one."""
        while self.started <= last:
            number, operation = self.started, self.launches[self.started]
            self.make(operation.operands)
            result = operation.tensors[0]
            self.pending[number] = Value(f"{result.name}_start", result.meta)
            self.operations.append(attrs.evolve(operation, op=operation.op.start, results=(self.pending[number],)))
            self.started += 1

    def finish(self, number: int) -> None:
        """Wait for a launch."""
        self.start(number)
        operation = self.launches[number]
        finished = attrs.evolve(operation, op=operation.op.finish, args=(self.pending.pop(number),))
        self.operations.append(finished)
        self.made.update(finished.tensors)


def _launches(graph: Graph) -> list[list[Operation]]:
    """The collectives of each launch, in launch order."""
    found: dict[int, list[Operation]] = defaultdict(list)
    for operation in graph.operations:
        if isinstance(operation.op, EXCHANGES):
            found[_comm(operation).launch].append(operation)
    return [found[number] for number in sorted(found)]


def _placed(graph: Graph, launches: Sequence[Sequence[Operation]]) -> list[Launch]:
    """Where launches are in a program."""
    root: dict[Value, Value] = {}
    made: dict[Value, float] = {}
    needed: dict[Value, float] = {}
    calls: dict[Operation, Call[Value]] = {}
    for position, operation in enumerate(graph.operations):
        reads = [root.get(value, value) for value in operation.operands]
        if _is_view(operation):
            root.update(dict.fromkeys(operation.tensors, reads[0]))
        elif isinstance(operation.op, EXCHANGES):
            calls[operation] = Call(position, reads, operation.tensors, _comm(operation).bytes)
        else:
            made.update(dict.fromkeys(operation.tensors, position))
            for value in reads:
                needed.setdefault(value, position)
    groups = [[calls[operation] for operation in found] for found in launches]
    return placed(groups, made, needed, len(graph.operations))


def _is_view(operation: Operation) -> bool:
    return isinstance(operation.op, torch._ops.OpOverload) and operation.is_view


def _comm(operation: Operation) -> Comm:
    assert operation.annotations.comm is not None, "every collective has its record"
    return operation.annotations.comm


def _joined(operations: Sequence[Operation]) -> Operation:
    """One operation that runs the collectives of a launch."""
    if len(operations) == 1:
        return operations[0]
    return attrs.evolve(
        operations[0],
        op=Bucket.of([operation.op for operation in operations]),
        args=tuple(operation.operands[0] for operation in operations),
        results=tuple(operation.tensors[0] for operation in operations),
    )
