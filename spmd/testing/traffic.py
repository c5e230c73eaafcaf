"""Compares the collectives of a plan with those that ran."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import attrs

from spmd.collectives.traffic import Traffic
from spmd.inspect.plan import Plan
from spmd.ir.graph import Operation
from spmd.ir.regions import BEGINS, BRANCH, LOOP, OTHERWISE, PROCEED
from spmd.plan.cost.account import account

Sent: TypeAlias = tuple[str, tuple[str, ...], float]
"""A collective: its kind, its mesh axes, and the most bytes that any rank sends."""


def comms_differences(plan: Plan, traffic: Traffic) -> list[str]:
    """The differences between the collectives of a plan and those that one call of its program ran; [] if none.

    They are compared in order of execution: kind, mesh axes, and the most bytes that any rank sends. Those of a loop
    are expected in each trip, and those of either side of a branch; the first difference is then the only one.

    Args:
        plan: the plan of the call, `jitted.plan(*arguments)`.
        traffic: the result of `record_traffic` around the call, on a virtual mesh.

    Returns:
        One line of text for each difference.

    >>> comms_differences(jitted.plan(*arguments), traffic)  # doctest: +SKIP
    ['collective 0: planned all_gather over x, 60.0 bytes; ran all_gather over x, 56.0 bytes']
    """
    planned = [(comm.kind, comm.axes, float(comm.bytes) / comm.times) for comm in plan.comms]
    ran = [(found.kind, found.axes, float(max(found.sent))) for found in traffic.transfers]
    if plan.graph.regions:
        return _Expected(plan, planned, ran).differences()
    return [
        _difference(index, expected, actual)
        for index, (expected, actual) in enumerate(itertools.zip_longest(planned, ran))
        if expected != actual
    ]


@attrs.define
class _Expected:
    """The collectives of a program with loops and branches, as a pattern of those that ran.

    Args:
        plan: the plan.
        planned: its collectives, of one trip each.
        ran: those that ran.
        furthest: the first one of these that no way through the program has run, and what such ways expect there.
    """

    plan: Plan
    planned: Sequence[Sent]
    ran: Sequence[Sent]
    furthest: tuple[int, Sent | None] = (0, None)

    def differences(self) -> list[str]:
        """The first difference, if there is one."""
        found = account(self.plan)
        rest = iter(self.planned)
        of = {operation: list(itertools.islice(rest, len(comms))) for operation, comms in found.comms.items()}
        operations = [operation for unit in found.units for operation in unit.operations]
        ends = self._after(operations, of.get, {0})
        if len(self.ran) in ends:
            return []
        index, expected = max((max(ends), None), self.furthest, key=lambda at: at[0]) if ends else self.furthest
        return [_difference(index, expected, self.ran[index] if index < len(self.ran) else None)]

    def _after(self, operations: Sequence[Operation], of: Callable[..., list[Sent] | None], at: set[int]) -> set[int]:
        """How many collectives may have run after some operations, of the numbers before them."""
        for operation, parts in self._parts(operations):
            if operation.op is LOOP:
                for _ in range(operation.args[0]):
                    at = self._after(parts[0], of, at)
            elif operation.op is BRANCH:
                at = set().union(*(self._after(part, of, at) for part in parts))
            elif operation.op in BEGINS:
                at = new = self._after(parts[0], of, at)
                while new:
                    new = self._after(parts[0], of, self._after(parts[1], of, new)) - at
                    at = at | new
            else:
                for sent in of(operation) or ():
                    at = self._sent(sent, at)
        return at

    def _sent(self, sent: Sent, at: set[int]) -> set[int]:
        """How many collectives may have run after one of the plan."""
        found = {index + 1 for index in at if index < len(self.ran) and self.ran[index] == sent}
        if at and max(at) >= self.furthest[0] and max(at) + 1 not in found:
            self.furthest = (max(at), sent)
        return found

    def _parts(self, operations: Sequence[Operation]) -> Iterator[tuple[Operation, list[list[Operation]]]]:
        """The operations outside of regions and, with what is inside of it, those that begin one."""
        regions, position = self.plan.graph.regions, 0
        while position < len(operations):
            operation, *inside = regions.whole(operations[position])
            parts: list[list[Operation]] = [[]]
            for inner in inside:
                divides = inner.op in (OTHERWISE, PROCEED) and inner.operands[-1] is operation.tensors[0]
                parts.append([]) if divides else parts[-1].append(inner)
            position += 1 + len(inside)
            yield operation, parts


def _difference(index: int, expected: Sent | None, actual: Sent | None) -> str:
    return f"collective {index}: planned {_text(expected)}; ran {_text(actual)}"


def _text(found: Sent | None) -> str:
    if found is None:
        return "nothing"
    kind, axes, sent = found
    return f"{kind} over {', '.join(axes)}, {sent:,} bytes"
