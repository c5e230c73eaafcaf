"""How two plans differ: of one program with other specs, machines or meshes, or of two versions of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from spmd.errors import PlanError
from spmd.inspect.saving.document import make_document, saved_machine
from spmd.inspect.saving.schema import Document
from spmd.ir.markers import FREE, MARKERS
from spmd.plan.data.plan import PlanData

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
        machines, meshes: the machines and the meshes that they are for, as text.
    """

    values: tuple[Change, ...]
    comms: tuple[CommChange, ...]
    seconds: tuple[float, float]
    bytes: tuple[float, float]
    memory: tuple[int, int]
    machines: tuple[str, str]
    meshes: tuple[str, str]

    def __bool__(self) -> bool:
        """Whether the plans differ."""
        figures = (self.seconds, self.bytes, self.memory, self.machines, self.meshes)
        return bool(self.values or self.comms) or any(first != second for first, second in figures)

    def __str__(self) -> str:
        if not self:
            return "The plans are the same."
        (seconds, later), (sent, more), (held, holds) = self.seconds, self.bytes, self.memory
        lines = [
            *_changed("made for another mesh", self.meshes),
            *_changed("made for another machine, so that seconds tell the machines apart as well", self.machines),
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


def _changed(what: str, pair: tuple[str, str]) -> list[str]:
    return [] if pair[0] == pair[1] else [f"{what}:", f"  {pair[0]}", f"  -> {pair[1]}"]


def difference(first: PlanData, second: PlanData) -> Difference:
    """How a second plan differs from a first; errors as of `compare`."""
    return compare(make_document(first), make_document(second))


def compare(first: Document, second: Document) -> Difference:
    """How a second plan differs from a first, from their documents.

    Raises:
        PlanError: no value of one program, argument or computed, has the name, shape and dtype of one of the other.
    """
    before, after = _layouts(first), _layouts(second)
    if before and after and not before.keys() & after.keys():
        raise PlanError(
            "The plans are of programs that have nothing in common: no value of one has the name, shape and dtype of "
            f"one of the other.\n  the first has  {_some(before)}\n  the second has {_some(after)}\n"
            "  Compare plans of one function, on other specs, meshes or machines, or of two versions of it."
        )
    changes = (
        Change(f"{name} {meta}", before.get((name, meta)), after.get((name, meta)))
        for name, meta in dict.fromkeys((*before, *after))
        if before.get((name, meta)) != after.get((name, meta))
    )
    return Difference(
        tuple(changes),
        _comm_changes(first, second),
        (first["seconds"], second["seconds"]),
        (_sent(first), _sent(second)),
        (first["memory"]["peak"], second["memory"]["peak"]),
        (str(saved_machine(first)), str(saved_machine(second))),
        (_mesh(first), _mesh(second)),
    )


def _some(layouts: Mapping[tuple[str, str], str]) -> str:
    shown = ", ".join(f"{name} {meta}" for name, meta in list(layouts)[:4])
    return shown + (f" and {len(layouts) - 4} more" if len(layouts) > 4 else "")


def _sent(document: Document) -> float:
    return float(sum(comm["bytes"] for comm in document["comms"]))


def _mesh(document: Document) -> str:
    return ", ".join(f"{name}={size}" for name, size in document["mesh"].items())


def _layouts(document: Document) -> Mapping[tuple[str, str], str]:
    """The layout of every value of the program, by its name and meta; without redistributed and repeated ones."""
    markers = {str(op) for op in (*MARKERS, FREE)}
    computed: dict[int, list[str]] = {}
    for operation in document["operations"]:
        if operation["operator"] not in markers and operation["of"] is not None:
            computed.setdefault(operation["of"], operation["results"])
    names = [*document["arguments"], *document["constants"], *(name for n in sorted(computed) for name in computed[n])]
    seen: Counter[str] = Counter()
    found = {}
    for name in names:
        base, value = name.partition(":")[0], document["values"][name]
        seen[base] += 1
        found[base if seen[base] == 1 else f"{base}:{seen[base]}", value["meta"]] = value["spec"]
    return found


def _comm_changes(first: Document, second: Document) -> tuple[CommChange, ...]:
    counts = [
        Counter((c["kind"], tuple(c["axes"]), c["bytes"], c["cause"], c["at"]) for c in document["comms"])
        for document in (first, second)
    ]
    keys = dict.fromkeys((*counts[0], *counts[1]))
    return tuple(
        CommChange(*key, before=counts[0][key], after=counts[1][key])
        for key in keys
        if counts[0][key] != counts[1][key]
    )
