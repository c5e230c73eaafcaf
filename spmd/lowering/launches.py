"""Launches as operations of a rank's program: where collectives start, and where they are waited for.

Every launch becomes two operations: one starts it, one waits for its results. Launches start in the order of the plan,
the same on all ranks, although their programs differ in views that are identities on some ranks; where each starts,
`spmd.ir.launch_schedule` says. It is waited for before the first use of a result, and so views of results stand there,
too. No launch is under way where a region begins or ends: each stretch between their bounds is split by itself.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import attrs

from spmd.ir.comm import Comm
from spmd.ir.graph import Graph, Operation, Value, producers_of
from spmd.ir.launch_schedule import PlacedCall, placed, starts
from spmd.ir.regions import stretches


@attrs.frozen(eq=False)
class Launch:
    """Collectives that are sent as one.

    Args:
        collectives: their operations, in the order of the program.
    """

    collectives: tuple[Operation, ...]

    @property
    def bytes(self) -> float:
        """What a rank sends in one run."""
        comms = (operation.annotations.comm for operation in self.collectives)
        return sum(comm.bytes_of_a_run for comm in comms if comm is not None)

    @property
    def operands(self) -> tuple[Value, ...]:
        """What is sent."""
        return tuple(value for operation in self.collectives for value in operation.operands)

    @property
    def results(self) -> tuple[Value, ...]:
        """The result of each collective."""
        return tuple(operation.tensors[0] for operation in self.collectives)


@attrs.frozen
class Start:
    """The operator that starts a launch: from the operands to what is pending."""

    launch: Launch


@attrs.frozen
class Wait:
    """The operator that waits for a launch: from what is pending to the results."""

    launch: Launch


def with_records(graph: Graph, comms: Iterable[Comm]) -> Graph:
    """A rank's program whose collectives have the records of a plan; their bytes are those of the rank.

    Args:
        graph: the program.
        comms: the plan's collectives, in order of execution.
    """
    records = iter(comms)
    operations = []
    for operation in graph.operations:
        if (own := operation.annotations.comm) is not None:
            comm = next(records)
            comm = attrs.evolve(comm, bytes=own.bytes * comm.times)
            notes = attrs.evolve(operation.annotations, comm=comm)
            operation = attrs.evolve(operation, source=comm.source, annotations=notes)
        operations.append(operation)
    return attrs.evolve(graph, operations=tuple(operations))


def split_launches(graph: Graph, window_bytes: float) -> Graph:
    """A rank's program in which every launch is started and, later, waited for.

    Args:
        graph: the program, whose collectives have records.
        window_bytes: as in `LaunchSchedule`.
    """
    parts = [_Splitter(stretch, window_bytes).run() for stretch in stretches(graph.operations)]
    return attrs.evolve(graph, operations=tuple(itertools.chain.from_iterable(parts)))


class _Splitter:
    """The operations so far of a stretch. Those that wait for a collective are added when they are needed."""

    def __init__(self, stretch: Sequence[Operation], window_bytes: float) -> None:
        self.stretch = stretch
        self.producers = producers_of(stretch)
        self.launches = _launches(stretch)
        self.launch_of = {value: n for n, launch in enumerate(self.launches) for value in launch.results}
        self.starts: dict[int, int] = {}
        """The number of the last launch that starts at each position."""
        groups = [launch.collectives for launch in self.launches]
        for number, position in enumerate(PlacedCalls.of(stretch).starts(groups, window_bytes)):
            self.starts[position] = number
        self.pending: dict[int, Value] = {}
        """What the launches that are under way are waited for by."""
        self.started = 0
        self.effects = [
            operation for operation in stretch if operation.effect is not None and operation.annotations.comm is None
        ]
        self.operations: list[Operation] = []
        self.added: set[Operation] = set()
        self.missing = set(self.producers)
        """The values of the stretch that are not there."""

    def run(self) -> list[Operation]:
        """All operations in their new order."""
        later = []
        for position, operation in enumerate(self.stretch):
            self.start(self.starts.get(position, -1))
            if operation.annotations.comm is None and not self.is_view_of_result(operation):
                self.add(operation)
            else:
                later.append(operation)
        self.start(len(self.launches) - 1)
        for operation in later:
            self.make(operation.tensors)
        return self.operations

    def is_view_of_result(self, operation: Operation) -> bool:
        """Whether it is a view of a result that is not there, or of such a view."""
        return operation.is_view and not self.missing.isdisjoint(operation.operands)

    def make(self, values: Sequence[Value]) -> None:
        """Add what makes values, unless they are there."""
        if self.missing.isdisjoint(values):
            return
        for value in values:
            if value not in self.missing:
                continue
            if value in self.launch_of:
                self.wait(self.launch_of[value])
            else:
                self.add(self.producers[value])

    def add(self, operation: Operation) -> None:
        """Add an operation and what it needs, unless it is there."""
        if operation in self.added:
            return
        self.added.add(operation)
        if operation.effect is not None:  # in the order of the program, as random numbers are drawn
            for earlier in self.effects[: self.effects.index(operation)]:
                self.add(earlier)
        self.make(operation.operands)
        self.operations.append(operation)
        self.missing.difference_update(operation.tensors)

    def start(self, last: int) -> None:
        """Start all launches up to one."""
        while self.started <= last:
            number, launch = self.started, self.launches[self.started]
            self.make(launch.operands)
            result = launch.results[0]
            self.pending[number] = Value(f"{result.name}_start", result.meta)
            first = launch.collectives[0]
            results = (self.pending[number],)
            self.operations.append(attrs.evolve(first, op=Start(launch), args=launch.operands, results=results))
            self.started += 1

    def wait(self, number: int) -> None:
        """Wait for a launch."""
        self.start(number)
        launch = self.launches[number]
        pending, first = self.pending.pop(number), launch.collectives[0]
        self.operations.append(attrs.evolve(first, op=Wait(launch), args=(pending,), results=launch.results))
        self.missing.difference_update(launch.results)


def _launches(stretch: Sequence[Operation]) -> list[Launch]:
    """The launches, in their order."""
    found: dict[int, list[Operation]] = defaultdict(list)
    for operation in stretch:
        if operation.annotations.comm is not None:
            found[operation.annotations.comm.launch].append(operation)
    return [Launch(tuple(found[number])) for number in sorted(found)]


@attrs.frozen(eq=False)
class PlacedCalls:
    """The collectives of a stretch, and the positions that decide where launches of them start.

    Args:
        calls: by collective, in the order of the stretch.
        made, needed: as of `placed`.
        end: the end of the stretch.
    """

    calls: Mapping[Operation, PlacedCall[Value]]
    made: Mapping[Value, float]
    needed: Mapping[Value, float]
    end: int

    @classmethod
    def of(cls, stretch: Sequence[Operation]) -> PlacedCalls:
        """Those of a stretch, whose collectives need records of their bytes only."""
        root: dict[Value, Value] = {}
        made: dict[Value, float] = {}
        needed: dict[Value, float] = {}
        calls: dict[Operation, PlacedCall[Value]] = {}
        for position, operation in enumerate(stretch):
            reads = [root.get(value, value) for value in operation.operands]
            if operation.is_view:
                root.update(dict.fromkeys(operation.tensors, reads[0]))
            elif (comm := operation.annotations.comm) is not None:
                calls[operation] = PlacedCall(position, reads, operation.tensors, comm.bytes_of_a_run)
            else:
                made.update(dict.fromkeys(operation.tensors, position))
                for value in reads:
                    needed.setdefault(value, position)
        return cls(calls, made, needed, len(stretch))

    def starts(self, launches: Iterable[Sequence[Operation]], window_bytes: float) -> list[int]:
        """The position at which each launch starts, from its collectives."""
        groups = [[self.calls[operation] for operation in launch] for launch in launches]
        return starts(placed(groups, self.made, self.needed, self.end), window_bytes)
