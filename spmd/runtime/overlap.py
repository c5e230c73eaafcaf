"""A rank's graph for torch.distributed: collectives overlap with computation.

Every collective becomes two calls: one starts it, one waits for its result (finish). A start moves up to just after the
operator that computes its operand, but not above the first use of the previous collective's result. So at most two are
in flight, which bounds memory: a program that all-gathers parameters must not gather all of them at once. A start never
passes another start, so that ranks whose graphs differ (in views that are identities on some ranks) communicate in the
same order. A finish moves down to the first use of the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs

from spmd.collectives.distributed.bucket import Bucket
from spmd.collectives.distributed.exchange import Exchange, bind
from spmd.collectives.distributed.printer import Printer
from spmd.collectives.distributed.ragged import RaggedExchange
from spmd.collectives.host import HOST_PRINT
from spmd.core.mesh import Coordinate, Mesh
from spmd.ir.graph import Graph, Operation, Value
from spmd.lowering.program import is_primitive
from spmd.runtime.launches import Joined, in_launch_order

EXCHANGES = (Exchange, RaggedExchange, Bucket)
"""What a rank does for a collective: it can be started, and finished later."""


def overlap(graph: Graph, mesh: Mesh, coordinate: Coordinate, *, synchronous: bool = False) -> Graph:
    """Split the collectives of a rank's program into starts and finishes.

    Args:
        graph: the program.
        mesh: a distributed mesh.
        coordinate: the mesh coordinate of this process's rank.
        synchronous: whether each collective is waited for where it stands, instead.

    Returns:
        A program in which every primitive is bound to what this rank does for it.
    """
    ordered = graph if synchronous else in_launch_order(graph)
    operations = tuple(_bind(operation, mesh, coordinate) for operation in ordered.operations)
    bound = attrs.evolve(graph, operations=operations)
    return bound if synchronous else split_exchanges(bound)


def _bind(operation: Operation, mesh: Mesh, coordinate: Coordinate) -> Operation:
    """A primitive as this rank's implementation of it, with all arguments but the operand bound."""
    if isinstance(operation.op, Joined):
        return attrs.evolve(operation, op=Bucket.of([_bind(o, mesh, coordinate).op for o in operation.op.operations]))
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


@attrs.frozen
class _Window:
    """Where a collective is in flight: positions of the operations before which its start and its finish stand."""

    start: int
    finish: int


def split_exchanges(graph: Graph) -> Graph:
    """A program in which every call of `EXCHANGES` is split into a start and, later, a finish."""
    exchanges = [operation for operation in graph.operations if isinstance(operation.op, EXCHANGES)]
    starts, finishes = defaultdict(list), defaultdict(list)
    for operation, window in zip(exchanges, _windows(graph, exchanges), strict=True):
        starts[window.start].append(operation)
        finishes[window.finish].append(operation)
    pending: dict[Operation, Value] = {}
    results = {value for operation in exchanges for value in operation.tensors}
    operations: list[Operation] = []

    def start(operation: Operation) -> None:
        result = operation.tensors[0]
        pending[operation] = Value(f"{result.name}_start", result.meta)
        operations.append(attrs.evolve(operation, op=operation.op.start, results=(pending[operation],)))

    def finish(waiting: list[Operation]) -> None:
        for operation in waiting:
            operations.append(attrs.evolve(operation, op=operation.op.finish, args=(pending.pop(operation),)))
        waiting.clear()

    def before(position: int) -> None:
        for exchange in starts[position]:
            if not results.isdisjoint(exchange.operands):  # an operand may be the result of a pending one
                finish(finishes[position])
            start(exchange)
        finish(finishes[position])

    for position, operation in enumerate(graph.operations):
        before(position)
        if not isinstance(operation.op, EXCHANGES):
            operations.append(operation)
    before(len(graph.operations))
    return attrs.evolve(graph, operations=tuple(operations)).verify()


def _windows(graph: Graph, exchanges: Sequence[Operation]) -> list[_Window]:
    made = {value: index for index, o in enumerate(graph.operations) for value in o.tensors}
    used: dict[Value, int] = {}
    for index, operation in reversed(list(enumerate(graph.operations))):
        used.update(dict.fromkeys(operation.operands, index))
    position = {operation: index for index, operation in enumerate(graph.operations)}
    results = {value for operation in exchanges for value in operation.tensors}
    windows: list[_Window] = []
    for operation in exchanges:
        start = position[operation]
        if results.isdisjoint(operation.operands):
            here, start = start, max(made.get(operand, -1) for operand in operation.operands) + 1
            if windows:
                start = max(start, windows[-1].start, min(here, windows[-1].finish))
        finish = min(used.get(value, len(graph.operations)) for value in operation.tensors)
        windows.append(_Window(start, finish))
    return windows
