"""What a rank in a process of its own holds for its collectives: buffers that are sent and received, while under way.

A collective is started early and waited for at the first use of its result (`spmd.ir.launch_schedule`), and those of
one launch share a flat buffer (`spmd.collectives.distributed`). The liveness of a plan has each as one event; here each
launch becomes two, a start and a finish, with the buffers that the runtime allocates.
"""

from __future__ import annotations

import math
from collections import defaultdict

import attrs

from spmd.core.spec import TensorMeta
from spmd.ir.comm import StepKind
from spmd.ir.launch_schedule import Call, placed, starts
from spmd.plan.data.plan import PlanData
from spmd.plan.memory.liveness import Buffer, Collective, Event, Liveness


@attrs.frozen
class Sizes:
    """The numbers of elements of the buffers of one collective on a rank; zero for one that is the operand or result.

    Args:
        packed: of the buffer that is sent.
        pending: of the buffer that is received.
        unpacked: of the result, if it is a copy of what was received.
        joined_packed, joined_unpacked: as `packed` and `unpacked`, where it is joined with others.
    """

    packed: int
    pending: int
    unpacked: int
    joined_packed: int
    joined_unpacked: int


def sizes(collective: Collective, ranks: int) -> Sizes:
    """The sizes of the buffers of a collective among so many ranks."""
    operand, result = collective.operand, collective.result
    sent, received = operand.numel, result.numel
    copied = 0 if collective.is_contiguous else sent
    if collective.kind is StepKind.ALL_REDUCE:
        return Sizes(copied, received, 0, sent, 0)
    if collective.kind is StepKind.ALL_GATHER:
        dim, length = collective.arguments[:2]
        even = length % ranks == 0
        chunk = -(-length // ranks) * math.prod(operand.shape[:dim] + operand.shape[dim + 1 :])
        unpacked = 0 if dim == 0 and even else received
        return Sizes(copied if chunk == sent else chunk, ranks * chunk, unpacked, chunk, received)
    if collective.kind is StepKind.REDUCE_SCATTER:
        dim = collective.arguments[1]
        length = operand.shape[dim]
        chunk = -(-length // ranks) * math.prod(operand.shape[:dim] + operand.shape[dim + 1 :])
        packed = copied if dim == 0 and length % ranks == 0 else ranks * chunk
        return Sizes(packed, chunk, 0, ranks * chunk, 0)
    if collective.kind is StepKind.ALL_TO_ALL and len(collective.arguments) == 4:
        split_dim, concat_dim, split_size, concat_size = collective.arguments[:4]
        packed = copied if split_dim == 0 and split_size % ranks == 0 else sent
        unpacked = 0 if concat_dim == 0 and concat_size % ranks == 0 else received
        return Sizes(packed, received, unpacked, packed, unpacked)
    if collective.kind is StepKind.PERMUTE:
        return Sizes(copied, received, 0, copied, 0)
    return Sizes(sent, received, received, sent, received)


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


def in_flight(plan: PlanData, liveness: Liveness) -> Liveness:
    """The liveness of a rank in a process of its own."""
    starts: dict[int, list[Event]] = defaultdict(list)
    finishes: dict[int, list[Event]] = defaultdict(list)
    shared: dict[Buffer, Buffer] = {}
    for launch in launches(plan, liveness):
        before, after = _events(plan, launch, shared)
        starts[launch.start] += before
        finishes[launch.finish] += after
    events: list[Event] = []
    for index, event in enumerate((*liveness.events, None)):
        events += (*starts[index], *finishes[index])
        if event is not None and not event.collective:
            events.append(attrs.evolve(event, reads=tuple(dict.fromkeys(shared.get(b, b) for b in event.reads))))
    copied = [buffer for buffer in dict.fromkeys(liveness.outputs) if buffer in shared]
    if copied:  # results are no views of a bucket, which they would hold as a whole
        events.append(Event(events[-1].operation, tuple(shared[buffer] for buffer in copied), tuple(copied)))
    return attrs.evolve(liveness, events=tuple(events))


def _events(plan: PlanData, launch: PlacedLaunch, shared: dict[Buffer, Buffer]) -> tuple[list[Event], list[Event]]:
    """The events of the start and of the finish of a launch; adds results that are views of a bucket to `shared`."""
    collectives = [event.collective for event in launch.events if event.collective]
    found = [sizes(one, plan.mesh.axis_size(one.axes)) for one in collectives]
    operation, is_joined = launch.events[0].operation, len(collectives) > 1
    in_place = collectives[0].kind is StepKind.ALL_REDUCE
    dtype = collectives[0].result.dtype
    flat = lambda numel: Buffer(None, TensorMeta((numel,), dtype))  # noqa: E731
    event = lambda reads, writes: Event(operation, tuple(dict.fromkeys(reads)), tuple(writes))  # noqa: E731
    operands = [shared.get(buffer, buffer) for event in launch.events for buffer in event.reads]
    results = [buffer for event in launch.events for buffer in event.writes]
    packs = [flat(size.packed) for size in found if size.packed]
    sent = [flat(sum(size.joined_packed for size in found))] if is_joined else packs
    unpacked = found[0].joined_unpacked if is_joined else found[0].unpacked
    if unpacked or (is_joined and not in_place):
        pending = [flat(sum(size.pending for size in found))]
    else:
        pending = sent if is_joined else results
    if is_joined and not unpacked:
        shared.update(dict.fromkeys(results, pending[0]))
    held = [] if in_place else sent or operands  # until it is waited for; an all_reduce works in place
    packing = [event(operands, dict.fromkeys((*packs, *sent)))] if packs or is_joined else []
    starts = [*packing, event((*operands, *sent), [] if pending is sent else pending)]
    finishes = [event((*held, *pending), ()), *([event(pending, results)] if unpacked else [])]
    return starts, finishes
