"""Suspicious moves: collectives that move far more than comes of what they move.

A gather is needed in full by an operator that splits its work by another operand, as a product does with a weight that
is gathered (FSDP). Where every rank runs the operator alike, and where an operator gets its operand with another
sharding, what is needed is no more than what comes of it: results that are results of the program, or that operators
take which split their work. A sort whose few rows are read, a median and a histogram need little of what they move.

Sums over ranks (all_reduce, reduce_scatter) finish what an operator began, and are never suspicious, nor are the
collectives that a user calls in a `shard_map`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import attrs

from spmd.collectives.primitives import COLLECTIVES
from spmd.core.placement import Replicate
from spmd.ir.comm import Comm
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.source import Source
from spmd.plan.cost.account import Account
from spmd.plan.data.causes import consumer_of, is_passed
from spmd.plan.data.plan import PlanData

TIMES = 4
"""A move is suspicious if it sends more than so many times what is needed,"""

LEAST_BYTES = 1e6
"""and more than this,"""

LEAST_PART = 0.05
"""and if such moves at its line take at least this part of the plan's predicted time."""


@attrs.frozen
class SuspiciousMove:
    """A collective that moves far more than comes of it.

    Args:
        comm: the collective, one of `plan.comms`, with its cause, its line and the bytes that a rank sends.
        needed: the bytes on a rank that come of what it moves.
        advice: what to do, in words.
        operation: the operation of the plan that communicates.
        parties: the names of the value that is moved, and of what is computed of it.
    """

    comm: Comm
    needed: float
    advice: str
    operation: Operation = attrs.field(repr=False, eq=False)
    parties: tuple[str, ...] = attrs.field(repr=False)

    @property
    def source(self) -> Source | None:
        """The line of the user's code; None if unknown."""
        return self.comm.source

    @property
    def bytes(self) -> float:
        """The most bytes that any rank sends."""
        return self.comm.bytes

    def __str__(self) -> str:
        return f"{self.comm}\n    {self.needed:,.0f} bytes on a rank come of it. {self.advice}"


def suspicious_moves(plan: PlanData, account: Account) -> tuple[SuspiciousMove, ...]:
    """The suspicious moves of a plan with this account, in order of execution."""
    found = tuple(_large_moves(plan, account))
    seconds: Counter[Source | None] = Counter()
    for move in found:
        seconds[move.source] += move.comm.seconds  # type: ignore[assignment]  # a Counter of floats
    return tuple(move for move in found if seconds[move.source] >= LEAST_PART * account.total)


def _large_moves(plan: PlanData, account: Account) -> Iterator[SuspiciousMove]:
    needs: dict[tuple[str, ...], Mapping[Value, float]] = {}
    for operation, comms in account.comms.items():
        for comm in comms:
            if comm.bytes <= LEAST_BYTES or comm.kind in ("all_reduce", "reduce_scatter"):
                continue
            if operation.op is REDISTRIBUTE:
                if comm.axes not in needs:
                    needs[comm.axes] = _needs(plan, comm.axes)
                needed = needs[comm.axes][operation.tensors[0]]
            elif operation.op not in COLLECTIVES:  # by its local implementation
                needed = _bytes(plan, {*operation.operands, *operation.tensors})
            else:
                continue
            if comm.bytes > TIMES * needed:
                yield _suspicious(plan, operation, comm, needed)


def _needs(plan: PlanData, axes: Collection[str]) -> Mapping[Value, float]:
    """The bytes on a rank that come of each value, if it is moved along mesh axes."""
    needs: Counter[Value] = Counter()
    for value in set(plan.graph.outputs):
        needs[value] = plan.specs[value].local_bytes()
    for operation in reversed(plan.graph.operations):
        results = sum(min(needs[value], plan.specs[value].local_bytes()) for value in operation.tensors)
        operands = set(operation.operands)
        for value in operands:
            if not is_passed(operation) and not _is_repeated(plan, operation, axes):
                gathered = all(plan.specs[value].placement(axis) == Replicate() for axis in axes)
                needs[value] += _bytes(plan, {value} if gathered else {*operation.tensors, *operands} - {value})
            else:
                needs[value] += results
    return needs


def _is_repeated(plan: PlanData, operation: Operation, axes: Collection[str]) -> bool:
    """Test whether all ranks along mesh axes run an operation on equal tensors."""
    strategies = plan.strategies.get(operation, {})
    states = (state for axis in axes for state in (*strategies[axis].operands, *strategies[axis].results))
    manual = (axis for value in operation.tensors for axis in plan.layout(value).manual)
    return all(state == Replicate() for state in states) and not {*axes}.intersection(manual)


def _bytes(plan: PlanData, values: Collection[Value]) -> int:
    return sum(plan.specs[value].local_bytes() for value in values)


def _suspicious(plan: PlanData, operation: Operation, comm: Comm, needed: float) -> SuspiciousMove:
    consumer = consumer_of(plan.graph, operation.tensors[0]) if operation.op is REDISTRIBUTE else operation
    value = plan.graph.origin(operation.operands[0], is_passed).name
    results = () if consumer is None else tuple(result.name for result in consumer.tensors)
    return SuspiciousMove(comm, needed, _advice(plan, operation, consumer, value), operation, (value, *results))


def _advice(plan: PlanData, operation: Operation, consumer: Operation | None, value: str) -> str:
    """The advice about the move of a value."""
    if consumer is None:
        return f"Take the part of {value} that is needed before it is moved."
    layout, name = plan.layout(operation.tensors[0]), consumer.name
    if operation is consumer:
        return f"The local implementation of {name} exchanges parts of {value}. Shard another dim of it."
    if any(layout.spec.dims):
        return f"Shard {value} as {layout} from the start, or reduce it before {name}."
    return f"Every rank runs {name} on all of it. Shard a dim that {name} does not go along, or reduce {value} before."
