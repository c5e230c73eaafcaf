"""A rank's program for torch.distributed: its primitives, bound to what this rank does for them.

A launch (`spmd.lowering.launches`) of several collectives is one bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs

from spmd.collectives.distributed.bucket import Bucket
from spmd.collectives.distributed.exchange import bind
from spmd.collectives.distributed.printer import Printer
from spmd.collectives.host import HOST_PRINT
from spmd.collectives.transport.exchange import Exchange
from spmd.collectives.transport.ragged_exchange import RaggedExchange
from spmd.core.mesh import Coordinate, Mesh
from spmd.ir.graph import Graph, Operation
from spmd.ir.launch_schedule import LaunchSchedule
from spmd.lowering.launches import Launch, Start, Wait, split_launches
from spmd.lowering.program import is_primitive

T = TypeVar("T")

EXCHANGES = (Exchange, RaggedExchange, Bucket)
"""What a rank does for a launch: it can be started, and finished later."""


def communicating(graph: Graph, mesh: Mesh, coordinate: Coordinate, schedule: LaunchSchedule | None) -> Graph:
    """A rank's program in which every primitive is bound to what this rank does for it.

    Args:
        graph: the program.
        mesh: a distributed mesh.
        coordinate: the mesh coordinate of this process's rank.
        schedule: how collectives are launched; None if each is waited for where it stands, instead.
    """
    if schedule is not None:
        graph = split_launches(graph, schedule.window_bytes).verify()
    return bound(graph, lambda operation: _bound(operation, mesh, coordinate))


def bound(graph: Graph, bind: Callable[[Operation], Any]) -> Graph:
    """A rank's program with other operators.

    Args:
        graph: the program.
        bind: from an operation to its operator, a function of tensors; of a collective, one of `EXCHANGES` or a
            function that does not communicate.
    """
    started: dict[Launch, Any] = {}

    def replaced(operation: Operation) -> Operation:
        if isinstance(operation.op, Start):
            launch = operation.op.launch
            parts = [bind(collective) for collective in launch.collectives]
            started[launch] = parts[0] if len(parts) == 1 else Bucket.of(parts)
            return attrs.evolve(operation, op=getattr(started[launch], "start", started[launch]))
        if isinstance(operation.op, Wait):
            return attrs.evolve(operation, op=getattr(started[operation.op.launch], "finish", _itself))
        op = bind(operation)
        return operation if op is operation.op else attrs.evolve(operation, op=op, args=_tensors(operation))

    return attrs.evolve(graph, operations=tuple(map(replaced, graph.operations)))


def _tensors(operation: Operation) -> tuple[Any, ...]:
    """The arguments of a primitive that are not bound."""
    return tuple(operation.args[0]) if operation.op is HOST_PRINT else operation.operands


def _itself(pending: T) -> T:
    """What a launch without communication returns has been there when it started."""
    return pending


def _bound(operation: Operation, mesh: Mesh, coordinate: Coordinate) -> Any:
    """The operator of an operation, of a primitive with all arguments but the tensors bound."""
    if not is_primitive(operation):
        return operation.op
    if operation.op is HOST_PRINT:
        return Printer(mesh, coordinate, tuple(operation.args[1]))
    operands, comm, source = operation.operands, operation.annotations.comm, operation.source
    cause = f"{comm.cause if comm else ''}{f' at {source}' if source else ''}"
    meta = operands[0].meta if operands else None
    return bind(operation.op, mesh, coordinate, meta, tuple(operation.args[len(operands) :]), cause)
