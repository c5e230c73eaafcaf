"""When collectives are under way: which of them start first, and where in a program each starts.

A launch starts as soon as its operands are made, as long as there is room: those that start before their places in the
program share a window of bytes. It is waited for where a result is first needed. The launches of a program start in one
order on all ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

import attrs

V = TypeVar("V", bound=Hashable)


@attrs.frozen
class LaunchSchedule:
    """How a rank in a process of its own launches the collectives of its program.

    Args:
        bucket_bytes: the bytes of the buffer up to which collectives are joined to one launch.
        window_bytes: the bytes of launches that may have started before their places in the program. One launch may
            always, unless this is zero.
    """

    bucket_bytes: float
    window_bytes: float


@attrs.frozen(eq=False)
class PlacedLaunch:
    """A launch in a program, by positions: what stands at a position runs after what starts there.

    Args:
        ready: the first position at which its operands are made.
        place: where the program has it.
        needed: where a result is first needed.
        bytes: what a rank sends.
    """

    ready: float
    place: float
    needed: float
    bytes: float
    latest: float = attrs.field(init=False)
    """The last position at which it may start."""

    @latest.default
    def _latest(self) -> float:
        return min(self.place, self.needed)


@attrs.frozen(eq=False)
class PlacedCall(Generic[V]):
    """A collective in a program.

    Args:
        place: its position.
        reads, writes: its operands and results; views count as what they are views of.
        bytes: what a rank sends.
    """

    place: float
    reads: Sequence[V]
    writes: Sequence[V]
    bytes: float


def placed(
    groups: Sequence[Sequence[PlacedCall[V]]], made: Mapping[V, float], needed: Mapping[V, float], end: float
) -> list[PlacedLaunch]:
    """Where launches are in a program.

    What one collective gives another sends: the first is needed where the other is launched.

    Args:
        groups: the collectives of each launch, in launch order.
        made: the positions of the operations that make values, without collectives.
        needed: the positions of the first operations that read values, without collectives.
        end: the end of the program, where its results are needed.
    """
    results = {value for group in groups for call in group for value in call.writes}
    needed = dict(needed)
    launches = []
    for group in reversed(groups):
        place = max(call.place for call in group)
        need = min(needed.get(value, end) for call in group for value in call.writes)
        reads = [value for call in group for value in call.reads]
        ready = latest = min(place, need)
        if results.isdisjoint(reads):
            ready = max((made.get(value, -1.0) for value in reads), default=-1.0) + 1
        needed |= {value: min(needed.get(value, end), latest) for value in results.intersection(reads)}
        launches.append(PlacedLaunch(min(ready, latest), place, need, sum(call.bytes for call in group)))
    return launches[::-1]


def starts(launches: Sequence[PlacedLaunch], window_bytes: float) -> list[int]:
    """The positions at which launches start that are given in launch order."""
    window, position, found = _Window(window_bytes), 0.0, []
    for launch in launches:
        position = max(position, launch.ready)
        while not window.takes(launch, position):
            position = min(launch.latest, window.next_room)
        window.add(launch)
        found.append(position)
    for number, launch in reversed(list(enumerate(launches))):  # a launch that must start takes those before it along
        found[number] = min(launch.needed, *found[number : number + 2])
    return [int(position) for position in found]


def launch_order(launches: Sequence[PlacedLaunch], window_bytes: float) -> list[PlacedLaunch]:
    """The order in which launches start: of those that may start, first the one whose result is needed first."""
    window, position = _Window(window_bytes), 0.0
    coming = deque(enumerate(sorted(launches, key=lambda launch: launch.ready)))
    needed: list[tuple[float, int, PlacedLaunch]] = []  # heaps of those that wait; one that starts stays in the other
    latest: list[tuple[float, int, PlacedLaunch]] = []
    started = bytearray(len(launches))
    ordered: list[PlacedLaunch] = []
    while len(ordered) < len(launches):
        while coming and coming[0][1].ready <= position:
            number, launch = coming.popleft()
            heappush(needed, (launch.needed, number, launch))
            heappush(latest, (launch.latest, number, launch))
        for heap in (needed, latest):
            while heap and started[heap[0][1]]:
                heappop(heap)
        first = latest[:1] if latest and latest[0][0] <= position else needed[:1]
        if first and window.takes(first[0][2], position):
            started[first[0][1]] = True
            window.add(first[0][2])
            ordered.append(first[0][2])
        else:
            room = latest[0][0] if latest else math.inf
            events = window.next_room, room, coming[0][1].ready if coming else math.inf
            position = min(event for event in events if event > position)
    return ordered


class _Window:
    """The launches that have started before their places."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.ahead: list[PlacedLaunch] = []
        self.used = 0.0
        self.next_room = math.inf
        """The first position at which a launch leaves."""

    def takes(self, launch: PlacedLaunch, position: float) -> bool:
        """Whether a launch may start at a position; positions do not go back."""
        if self.next_room <= position:
            ahead = [other for other in self.ahead if other.latest > position]
            self.ahead, self.used, self.next_room = [], 0.0, math.inf
            for other in ahead:
                self.add(other)
        fits = self.limit > 0 and (not self.ahead or self.used + launch.bytes <= self.limit)
        return fits or position >= launch.latest

    def add(self, launch: PlacedLaunch) -> None:
        """Start a launch."""
        self.ahead.append(launch)
        self.used += launch.bytes
        self.next_room = min(self.next_room, launch.latest)
