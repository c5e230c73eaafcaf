"""The figures of a plan for reports: by layer, by line of the program, by cause of communication, and in time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from spmd.core.quantity import size_text, time_text
from spmd.inspect.layers.layers import LayerGroup
from spmd.inspect.report.words import in_words, machine_figures
from spmd.inspect.saving.document import Document, saved_machine

_NUMBER = re.compile(r"(?<=_)\d+(?=_)")
"""The layer number in the name of an argument."""


@attrs.frozen
class Line:
    """The predicted cost of one line of the user's program in one step.

    Args:
        place: its file and number, with "(backward)" for the operators of its gradient; "" for operations without line.
        code: its text.
        operations: how many operations come from it.
        compute, communication: predicted seconds.
        bytes: sent per rank.
    """

    place: str
    code: str
    operations: int
    compute: float
    communication: float
    bytes: float


@attrs.frozen
class Layer:
    """The predicted cost of each of several equal layers that are sharded identically.

    Args:
        place: the lines of the repeated part of the program, with "(backward)" for the operators of its gradient.
        layers: the numbers of these layers, as in `0, 2-11 of 12` or `all 12`.
        operations: how many operations of the program one layer has.
        compute, communication: predicted seconds of one layer.
        bytes: sent per rank in one layer.
        otherwise: how these layers differ from the largest group, in words; "" for the largest group.
    """

    place: str
    layers: str
    operations: int
    compute: float
    communication: float
    bytes: float
    otherwise: str


@attrs.frozen
class SentForCause:
    """The collectives of one kind, over the same axes, for the same reason at the same line.

    Arguments of equal layers count as one: `blocks_*_up` stands for `blocks_0_up`, `blocks_1_up` and so on. `bytes` and
    `seconds` are sums over all `count` collectives.
    """

    kind: str
    axes: tuple[str, ...]
    cause: str
    place: str
    count: int
    bytes: float
    seconds: float


@attrs.frozen
class SuspiciousFigures:
    """A collective that moves far more than comes of it (`spmd.plan.cost.suspicious_moves`).

    Args:
        kind, cause, place: of the collective.
        bytes: sent per rank.
        needed: the bytes on a rank that come of it.
        advice: what to do.
    """

    kind: str
    cause: str
    place: str
    bytes: float
    needed: float
    advice: str


@attrs.frozen
class Span:
    """A bar of the timeline: consecutive operators of one line, or one collective.

    Args:
        kind: "compute" or the kind of collective.
        label: the line, or the cause of the collective and its line.
        start: predicted seconds from the start of the step.
        seconds: predicted duration.
    """

    kind: str
    label: str
    start: float
    seconds: float


@attrs.frozen
class HeldAt:
    """The memory of a rank during one operation, on the clock of the timeline: bytes from `start` to `stop`."""

    start: float
    stop: float
    bytes: int


@attrs.frozen
class PlanFigures:
    """The figures of one plan.

    Args:
        mesh: sizes of the axes.
        machine: the figures of the machine for which times are predicted, formatted, by name.
        gap: how much the plan may be slower than the best one, as in `PlanData`; None if there is no bound.
        compute, communication: predicted seconds of a step.
        step, exposed: seconds of a step in which they pass beside each other, and of the communication that does not.
        copies: seconds of the copies to and from the buffers of launches, which are in `step` and `exposed`.
        bytes: sent per rank in a step.
        memory: peak bytes held by a rank, by purpose; the sum is under "peak".
        peak_at: the operation at the peak, in words.
        layers: by repeated part of the program and by sharding.
        lines: one for each line, in order of first execution.
        causes: one for each cause, the most bytes first.
        suspicious: the suspicious moves, in order of execution.
        spans: in order of execution, one after the other.
        held: the memory during each operation, in the same order.
        fallbacks: operators without a rule, which run replicated, and their lines.
    """

    mesh: Mapping[str, int]
    machine: Mapping[str, str]
    gap: float | None
    compute: float
    communication: float
    step: float
    exposed: float
    copies: float
    bytes: float
    memory: Mapping[str, int]
    peak_at: str
    layers: tuple[Layer, ...]
    lines: tuple[Line, ...]
    causes: tuple[SentForCause, ...]
    suspicious: tuple[SuspiciousFigures, ...]
    spans: tuple[Span, ...]
    held: tuple[HeldAt, ...]
    fallbacks: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step: compute and communication one after the other."""
        return self.compute + self.communication

    @property
    def summary(self) -> dict[str, str]:
        """The figures of the whole step, formatted, by name."""
        part = 100 * self.communication / self.seconds if self.seconds else 0.0
        exposed = 100 * self.exposed / self.step if self.step else 0.0
        held = ", ".join(f"{size_text(nbytes)} {kind}" for kind, nbytes in self.memory.items() if kind != "peak")
        return {
            "mesh": ", ".join(f"{name}={count}" for name, count in self.mesh.items()),
            "step": time_text(self.step),
            "compute": time_text(self.compute),
            "communication": f"{time_text(self.communication)} ({part:.0f}%)",
            "copies to and from buffers": time_text(self.copies),
            "exposed of both": f"{time_text(self.exposed)} ({exposed:.0f}% of the step)",
            "sent per rank": size_text(self.bytes),
            "held per rank": f"{size_text(self.memory['peak'])} at the peak: {held}",
            "at the peak": self.peak_at,
            "search": self._search,
            "machine": self.machine["made for"],
        }

    @property
    def _search(self) -> str:
        if self.gap is None:
            return "not exact, without a bound"
        return f"at most {self.gap:.1%} above the best" if self.gap else "exact"


def make_report(document: Document) -> PlanFigures:
    """The figures of a plan from its document."""
    operations, timing = document["operations"], document["timing"]
    comms = [{**comm, "cause": in_words(comm["cause"])} for comm in document["comms"]]
    communication = sum(comm["seconds"] for comm in comms)
    return PlanFigures(
        mesh=document["mesh"],
        machine=machine_figures(saved_machine(document)),
        gap=document["gap"],
        compute=sum(operation["seconds"] for operation in operations),
        communication=communication,
        step=timing["step"],
        exposed=timing["exposed"],
        copies=max(timing["communication"] - communication, 0.0),
        bytes=sum(comm["bytes"] for comm in comms),
        memory=document["memory"],
        peak_at=document["peak_at"],
        layers=tuple(_layers(document["layers"])),
        lines=tuple(_lines(operations, comms)),
        causes=tuple(sorted(_causes(comms), key=lambda cause: (-cause.bytes, cause.place, cause.cause))),
        suspicious=tuple(_suspicious(comms)),
        spans=tuple(_spans(operations, comms)),
        held=tuple(_held(operations, comms)),
        fallbacks=tuple(f"{operations[n]['operator']} at {operations[n]['at']}" for n in document["fallbacks"]),
    )


def _layers(documents: list[Document]) -> Iterator[Layer]:
    for stretch in documents:
        for item in stretch["alike"]:
            alike = LayerGroup(**item)
            layers = (
                f"{alike.numbers} of {stretch['count']}" if len(stretch["alike"]) > 1 else f"all {stretch['count']}"
            )
            yield Layer(
                stretch["at"],
                layers,
                stretch["operations"],
                alike.compute,
                alike.communication,
                alike.bytes,
                alike.otherwise,
            )


def _lines(operations: list[Document], comms: list[Document]) -> Iterator[Line]:
    places = _grouped((operation["at"], operation) for operation in operations)
    sent = _grouped((comm["at"], comm) for comm in comms)
    for place, found in places.items():
        at = sent.pop(place, [])
        compute = sum(operation["seconds"] for operation in found)
        yield Line(place, found[0]["code"], len(found), compute, _total(at, "seconds"), _total(at, "bytes"))
    for place, at in sent.items():  # a collective may have a line without operations
        yield Line(place, "", 0, 0.0, _total(at, "seconds"), _total(at, "bytes"))


def _causes(comms: list[Document]) -> Iterator[SentForCause]:
    keys = ("kind", "axes", "cause", "at")
    alike = ({**comm, "cause": _NUMBER.sub("*", comm["cause"])} for comm in comms)
    for found in _grouped((str([comm[key] for key in keys]), comm) for comm in alike).values():
        kind, axes, cause, place = (found[0][key] for key in keys)
        yield SentForCause(
            kind, tuple(axes), cause, place, len(found), _total(found, "bytes"), _total(found, "seconds")
        )


def _suspicious(comms: list[Document]) -> Iterator[SuspiciousFigures]:
    for comm in comms:
        if comm["suspicious"] is not None:
            yield SuspiciousFigures(comm["kind"], comm["cause"], comm["at"], comm["bytes"], **comm["suspicious"])


def _spans(operations: list[Document], comms: list[Document]) -> Iterator[Span]:
    sent = _grouped((comm["operation"], comm) for comm in comms)
    clock, run = 0.0, None
    for number, operation in enumerate(operations):
        if operation["seconds"]:
            if run is not None and run.label == operation["at"]:
                run = attrs.evolve(run, seconds=run.seconds + operation["seconds"])
            else:
                if run is not None:
                    yield run
                run = Span("compute", operation["at"], clock, operation["seconds"])
            clock += operation["seconds"]
        for comm in sent.get(number, []):
            if run is not None:
                yield run
                run = None
            yield Span(comm["kind"], f"{comm['cause']}, at {comm['at']}", clock, comm["seconds"])
            clock += comm["seconds"]
    if run is not None:
        yield run


def _held(operations: list[Document], comms: list[Document]) -> Iterator[HeldAt]:
    sent = _grouped((comm["operation"], comm) for comm in comms)
    clock = 0.0
    for number, operation in enumerate(operations):
        stop = clock + operation["seconds"] + _total(sent.get(number, []), "seconds")
        yield HeldAt(clock, stop, operation["held"])
        clock = stop


def _grouped(pairs: Iterable[tuple[Any, Document]]) -> dict[Any, list[Document]]:
    groups: dict[Any, list[Document]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def _total(items: list[Document], key: str) -> float:
    return float(sum(item[key] for item in items))
