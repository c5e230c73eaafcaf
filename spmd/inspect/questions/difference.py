"""How two plans differ: of one program with other specs, machines or meshes, or of two versions of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from spmd.inspect.saving.document import unique_names
from spmd.plan.data.plan import PlanData
from spmd.plan.memory.peak import memory_of

SHOWN = 20
"""The most lines of each kind that a printed difference has."""


@attrs.frozen
class Change:
    """A value with different layouts in two plans; None for a plan that has no such value."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.before or 'absent'} -> {self.after or 'absent'}"


@attrs.frozen
class CommChange:
    """Collectives of one kind, axes, size and cause that one plan has more often than the other.

    Args:
        kind, axes, bytes, cause, source: as of the collectives.
        before, after: how many each plan has.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    cause: str
    source: str
    before: int
    after: int

    def __str__(self) -> str:
        sign, count = ("+", self.after - self.before) if self.after > self.before else ("-", self.before - self.after)
        times = f"{count} x " if count > 1 else ""
        where = f", at {self.source}" if self.source else ""
        axes = ", ".join(self.axes)
        return f"{sign} {times}{self.kind} over {axes}, {self.bytes:,.0f} bytes: {self.cause}{where}"


@attrs.frozen
class Difference:
    """How a second plan differs from a first; its `str` lists the differences.

    Args:
        values: the values of the program that are sharded differently, in order of definition. Values of the same name,
            shape and dtype count as the same value. Redistributions of a value show only in the collectives.
        comms: the collectives that differ.
        seconds, bytes, memory: predicted seconds, bytes sent per rank and peak bytes held, of the first and the second.
    """

    values: tuple[Change, ...]
    comms: tuple[CommChange, ...]
    seconds: tuple[float, float]
    bytes: tuple[float, float]
    memory: tuple[int, int]

    def __bool__(self) -> bool:
        """Whether the plans differ."""
        figures = (self.seconds, self.bytes, self.memory)
        return bool(self.values or self.comms) or any(first != second for first, second in figures)

    def __str__(self) -> str:
        if not self:
            return "The plans are the same."
        (seconds, later), (sent, more), (held, holds) = self.seconds, self.bytes, self.memory
        lines = [
            f"seconds a step  {seconds:.4g} -> {later:.4g}",
            f"bytes sent      {sent:,.0f} -> {more:,.0f}",
            f"bytes held      {held:,} -> {holds:,}",
        ]
        lines += _listed(f"values with another sharding ({len(self.values)}):", self.values)
        lines += _listed(f"collectives that differ ({len(self.comms)}):", self.comms)
        return "\n".join(lines)


def _listed(title: str, items: tuple[Change | CommChange, ...]) -> list[str]:
    rest = [f"  and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return [title, *(f"  {item}" for item in items[:SHOWN]), *rest] if items else []


def difference(first: PlanData, second: PlanData) -> Difference:
    """How a second plan differs from a first."""
    before, after = _layouts(first), _layouts(second)
    names = dict.fromkeys((*before, *after))
    changes = (
        Change(f"{name} {meta}", before.get((name, meta)), after.get((name, meta)))
        for name, meta in names
        if before.get((name, meta)) != after.get((name, meta))
    )
    sent = tuple(sum(comm.bytes for comm in plan.comms) for plan in (first, second))
    return Difference(
        tuple(changes),
        _comm_changes(first, second),
        (first.seconds, second.seconds),
        (sent[0], sent[1]),
        (memory_of(first).peak, memory_of(second).peak),
    )


def _layouts(plan: PlanData) -> Mapping[tuple[str, str], str]:
    """The layout of every value of the program, by its name and meta; redistributed values are left out."""
    program = unique_names(plan.request.graph)
    return {(name, str(v.meta)): str(plan.layout(v)) for v, name in program.items() if v in plan.specs}


def _comm_changes(first: PlanData, second: PlanData) -> tuple[CommChange, ...]:
    counts = [
        Counter((comm.kind, comm.axes, comm.bytes, comm.cause, str(comm.source or "")) for comm in plan.comms)
        for plan in (first, second)
    ]
    keys = dict.fromkeys((*counts[0], *counts[1]))
    return tuple(
        CommChange(*key, before=counts[0][key], after=counts[1][key])
        for key in keys
        if counts[0][key] != counts[1][key]
    )
