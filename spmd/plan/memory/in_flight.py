"""What a rank in a process of its own holds for its collectives: buffers that are sent and received, while under way.

A collective is started early and waited for at the first use of its result (`spmd.ir.launch_schedule`), and those of
one launch share a flat buffer (`spmd.collectives.distributed`). The liveness of a plan has each as one event; here each
launch becomes two, a start and a finish, with the buffers that the runtime allocates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from spmd.core.mesh import Coordinate
from spmd.ir.launch_schedule import Call, placed, starts
from spmd.plan.data.plan import PlanData
from spmd.plan.local.strided import StridedCall
from spmd.plan.memory.launch_buffers import Allocation, launch_buffers
from spmd.plan.memory.liveness import Buffer, Event, Liveness


@attrs.frozen(eq=False)
class PlacedLaunch:
    """Collectives that are launched as one, and where.

    Args:
        events: their events.
        start, finish: the positions of the events before which it is started and waited for.
    """

    events: tuple[Event, ...]
    start: int
    finish: int

    @property
    def calls(self) -> tuple[StridedCall, ...]:
        """The calls of its collectives."""
        return tuple(event.collective for event in self.events if event.collective)


def launches(plan: PlanData, liveness: Liveness) -> list[PlacedLaunch]:
    """The launches of a plan, in order, as the runtime places them."""
    found = [(index, event) for index, event in enumerate(liveness.events) if event.collective]
    if plan.schedule is None:
        return [PlacedLaunch((event,), index, index) for index, event in found]
    made: dict[Buffer, float] = {}
    needed: dict[Buffer, float] = {}
    for index, event in enumerate(liveness.events):
        if not event.collective and not event.is_view:
            made.update(dict.fromkeys(event.writes, index))
            for buffer in event.reads:
                if made.get(buffer, -1) < index:
                    needed.setdefault(buffer, index)
    groups: dict[int, list[Event]] = defaultdict(list)
    calls: dict[int, list[Call[Buffer]]] = defaultdict(list)
    for (index, event), comm in zip(found, plan.comms, strict=True):
        groups[comm.launch].append(event)
        calls[comm.launch].append(Call(index, event.reads, event.writes, comm.bytes))
    order = sorted(groups)
    where = placed([calls[number] for number in order], made, needed, len(liveness.events))
    begins = starts(where, plan.schedule.window_bytes)
    return [
        PlacedLaunch(tuple(groups[number]), start, int(launch.needed))
        for number, start, launch in zip(order, begins, where, strict=True)
    ]


def happenings_of(launches: Sequence[PlacedLaunch]) -> Mapping[int, Sequence[tuple[PlacedLaunch, bool]]]:
    """The launches that start or finish before each event, in order; the flag says whether one starts.

    Those that start come first, but for the finishes that give them their operands.
    """
    found: dict[int, list[tuple[PlacedLaunch, bool]]] = defaultdict(list)
    made = {buffer: launch for launch in launches for event in launch.events for buffer in event.writes}
    done: set[PlacedLaunch] = set()
    for launch in launches:
        for event in launch.events:
            for other in (made[buffer] for buffer in event.reads if buffer in made):
                if other.finish == launch.start and other not in done:
                    done.add(other)
                    found[launch.start].append((other, False))
        found[launch.start].append((launch, True))
    for launch in launches:
        if launch not in done:
            found[launch.finish].append((launch, False))
    return found


def in_flight(plan: PlanData, liveness: Liveness) -> Liveness:
    """The liveness of a rank in a process of its own."""
    happenings = happenings_of(launches(plan, liveness))
    shared: dict[Buffer, Buffer] = {}
    finishes: dict[PlacedLaunch, list[Event]] = {}
    ranks = ranks_like(plan, liveness.coordinate)
    events: list[Event] = []
    for index, event in enumerate((*liveness.events, None)):
        for launch, starts_here in happenings[index]:
            if starts_here:
                start, finishes[launch] = _events(plan, ranks, launch, shared)
                events += start
            else:
                events += finishes[launch]
        if event is not None and not event.collective:
            events.append(attrs.evolve(event, reads=tuple(dict.fromkeys(shared.get(b, b) for b in event.reads))))
    copied = [buffer for buffer in dict.fromkeys(liveness.outputs) if buffer in shared]
    if copied:  # results are no views of a bucket, which they would hold as a whole
        events.append(Event(events[-1].operation, tuple(shared[buffer] for buffer in copied), tuple(copied)))
    return attrs.evolve(liveness, events=tuple(events))


def ranks_like(plan: PlanData, coordinate: Coordinate) -> tuple[Coordinate, ...]:
    """The ranks that share the program of that at a coordinate, which comes first."""
    variants, others = plan.request.graph.variants, [other for other in plan.mesh.coordinates() if other != coordinate]
    if variants is not None:
        key = variants.unevenness.key
        others = [other for other in others if key(other) == key(coordinate)]
    return (coordinate, *others)


def _events(
    plan: PlanData, ranks: tuple[Coordinate, ...], launch: PlacedLaunch, shared: dict[Buffer, Buffer]
) -> tuple[list[Event], list[Event]]:
    """The events of the start and of the finish of a launch; adds results that share a buffer to `shared`."""
    found = launch_buffers(plan.mesh, ranks, launch.calls)
    operands = [shared.get(buffer, buffer) for event in launch.events for buffer in event.reads]
    buffers = dict(enumerate(operands))
    for number, result in zip(
        found.results, (buffer for event in launch.events for buffer in event.writes), strict=True
    ):
        if found.results.count(number) == 1:
            buffers[number] = result
        else:
            shared[result] = buffers.setdefault(number, Buffer(None, found.metas[number]))
    for number, meta in enumerate(found.metas):
        buffers.setdefault(number, Buffer(None, meta))
    sent, received = buffers[found.sent], buffers[found.received]

    def event(reads: Iterable[Buffer], writes: Iterable[Buffer]) -> Event:
        return Event(launch.events[0].operation, tuple(dict.fromkeys(reads)), tuple(writes))

    def allocate(held: Sequence[Buffer], allocations: Iterable[Allocation]) -> Iterator[Event]:
        for reads, writes in allocations:
            yield event((*held, *map(buffers.__getitem__, reads)), map(buffers.__getitem__, writes))

    # One call does all of it where nothing overlaps, and its caller holds the operands until it returns.
    held = operands if plan.schedule is None else []
    starts = [*allocate(operands, found.packing), event((*operands, sent), {received} - {sent})]
    waits = event((*([sent] if found.holds_sent else []), *held, received), ())
    return starts, [waits, *allocate([received, *held], found.unpacking)]
