"""Which collectives of a plan are launched as one.

A small collective takes as long as its latency, so collectives of one kind along the same axes are joined to buckets. A
bucket is launched when the operand of each of its collectives is there, and none of their results is needed before. So
no other operation moves, but for views of results, which wait.

Source: the buckets of DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import attrs
import torch

from spmd.collectives.primitives import COLLECTIVES, KINDS
from spmd.collectives.resharding import redistribution
from spmd.ir.comm import Comm
from spmd.ir.graph import Operation, Value
from spmd.ir.launch_schedule import LaunchSchedule, PlacedLaunch, launch_order
from spmd.ir.list_schedule import Unit
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.ir.regions import GIVE, LEAVES, stretches
from spmd.plan.data.plan import PlanData

Comms = Mapping[Operation, tuple[Comm, ...]]

_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32})
"""The dtypes that are joined, each with itself."""


@attrs.frozen(eq=False)
class _TimedCollective:
    """A collective, and when it can be launched; the operation at index i of a rank's program runs at time i.

    Args:
        comm: its record.
        here: the time of its place in the program.
        ready, needed: its operand is made by the one time, its result is needed at the other.
        buffer: the bytes of its larger buffer.
        goes_on: whether its result is sent by another collective of the same operation.
        key: what it has in common with those of its bucket; None if it is launched alone.
    """

    comm: Comm
    here: float
    ready: float
    needed: float
    buffer: float
    goes_on: bool
    key: Hashable

    def after(self, ready: float) -> _TimedCollective:
        """The collective whose operand is made by a time, after which it is launched.

        What it sends may be a result of a bucket with a later operation.
        """
        return attrs.evolve(self, ready=ready, here=max(self.here, math.nextafter(ready, math.inf)))


class _Launch:
    """Collectives that are launched as one."""

    def __init__(self, call: _TimedCollective) -> None:
        self.calls = [call]
        self.here, self.ready, self.needed, self.buffer = call.here, call.ready, call.needed, call.buffer

    @property
    def place(self) -> float:
        """The time of the launch: as late as the last of its collectives stands, unless a result is needed earlier."""
        return min(self.here, self.needed)

    @property
    def goes_on(self) -> bool:
        """Whether a result is what another collective of the same operation sends."""
        return any(call.goes_on for call in self.calls)

    def placed(self) -> PlacedLaunch:
        """The launch in the program."""
        sent = sum(call.comm.bytes_of_a_run for call in self.calls)
        return PlacedLaunch(min(self.ready + 1, self.place), self.place, self.needed, sent)

    def takes(self, call: _TimedCollective, limit: float) -> bool:
        """Whether a collective can join: at some time all operands are made, and no result is needed yet."""
        fits = max(self.ready, call.ready) < min(self.needed, call.needed)
        return fits and self.buffer + call.buffer <= limit

    def add(self, call: _TimedCollective) -> None:
        """Join a collective."""
        self.calls.append(call)
        self.here, self.ready = max(self.here, call.here), max(self.ready, call.ready)
        self.needed, self.buffer = min(self.needed, call.needed), self.buffer + call.buffer


@attrs.frozen(eq=False)
class Stretch:
    """The collectives of a plan between two bounds of regions, which any schedule joins to launches.

    Args:
        comms: the collectives of each operation.
        steps: the first collective of each operation, in the order of the program, then the second ones, and so on.
    """

    comms: Comms
    steps: tuple[tuple[tuple[Operation, _TimedCollective], ...], ...]

    @classmethod
    def of(cls, plan: PlanData, comms: Comms, executed: Sequence[Operation], calls: Mapping[Operation, int]) -> Stretch:
        """The collectives `comms` of operations in order of execution, without bounds of regions.

        Args:
            plan, comms: as of `stretches_of`.
            executed: the operations, those of one call one after the other.
            calls: by operation, the number of its call.
        """
        numbers = [calls[operation] for operation in executed]
        begins = [bisect_left(numbers, number) for number in numbers]
        ends = [bisect_right(numbers, number) - 1 for number in numbers]
        needed = _needed(executed, begins)
        made, leaving = _made(executed, ends, comms, needed), _leaving(executed)
        steps: dict[int, list[tuple[Operation, _TimedCollective]]] = defaultdict(list)
        for time, operation in enumerate(executed):
            for step, comm in enumerate(comms.get(operation, ())):
                ready = max(map(made.__getitem__, operation.operands), default=-1.0)
                buffer = KINDS[comm.kind].buffer(plan.mesh.axis_size(comm.axes), comm.bytes_of_a_run)
                key = _key(plan, operation, comms[operation], step, leaving)
                call = _call(operation, comms[operation], step, time, ready, needed, buffer, key)
                steps[step].append((operation, call))
        return cls(comms, tuple(tuple(steps[step]) for step in range(len(steps))))

    def joined(
        self, schedule: LaunchSchedule | None, numbers: Iterator[int]
    ) -> Iterator[tuple[Operation, tuple[Comm, ...]]]:
        """The collectives of each operation with the numbers of their launches, which are the next of `numbers`."""
        limit, window = (schedule.bucket_bytes, schedule.window_bytes) if schedule else (0.0, 0.0)
        smallest: dict[Hashable, float] = {}
        for _, call in itertools.chain.from_iterable(self.steps):
            smallest[call.key] = min(call.buffer, smallest.get(call.key, math.inf))
        launches: list[_Launch] = []
        found: dict[Operation, list[_Launch]] = {operation: [] for operation in self.comms}
        waiting: dict[Hashable, list[_Launch]] = {}
        for step in self.steps:
            for operation, call in step:
                call = call.after(found[operation][-1].place) if found[operation] else call
                joins = call.key is not None and call.buffer + smallest[call.key] <= limit
                others = waiting.setdefault(call.key, []) if joins else []
                launch = next((other for other in reversed(others) if other.takes(call, limit)), None)
                if launch is not None:
                    launch.add(call)
                    if launch.buffer + smallest[call.key] > limit:
                        others.remove(launch)
                else:
                    launch = _Launch(call)
                    launches.append(launch)
                    others.append(launch)
                found[operation].append(launch)
            waiting = {key: [other for other in others if not other.goes_on] for key, others in waiting.items()}
        placed = {launch.placed(): launch for launch in sorted(launches, key=lambda launch: launch.place)}
        number_of = {placed[one]: next(numbers) for one in launch_order(list(placed), window)}
        for operation, comms in self.comms.items():
            pairs = zip(comms, found[operation], strict=True)
            yield (
                operation,
                tuple(attrs.evolve(comm, launch=number_of[launch], joined=len(launch.calls)) for comm, launch in pairs),
            )


def stretches_of(plan: PlanData, comms: Comms, units: Sequence[Unit]) -> tuple[Stretch, ...]:
    """The collectives of a plan, which is not read for its schedule, by stretches of the program that have any.

    Args:
        plan: the plan.
        comms: the collectives of each operation.
        units: the calls of a rank, in order.
    """
    calls = {operation: number for number, unit in enumerate(units) for operation in unit.operations}
    executed = tuple(calls)
    sent = ((stretch, {o: comms[o] for o in stretch if o in comms}) for stretch in stretches(executed))
    return tuple(Stretch.of(plan, found, stretch, calls) for stretch, found in sent if found)


def with_launches(sent: Iterable[Stretch], schedule: LaunchSchedule | None) -> dict[Operation, tuple[Comm, ...]]:
    """The collectives with the numbers of their launches; without a schedule each is launched alone, in their order.

    No launch passes a bound of a loop or a branch.
    """
    numbers = itertools.count()
    return dict(pair for stretch in sent for pair in stretch.joined(schedule, numbers))


def _call(
    operation: Operation,
    found: Sequence[Comm],
    step: int,
    time: int,
    ready: float,
    needed: Mapping[Value, float],
    buffer: float,
    key: Hashable,
) -> _TimedCollective:
    """A collective of an operation: the first ones are launched within half a unit of time of the last one."""
    rest = (len(found) - step) / (2 * len(found))
    last = min((needed.get(value, math.inf) for value in operation.tensors), default=math.inf)
    call = _TimedCollective(found[step], time + 0.5 - rest, ready, last - rest, buffer, step + 1 < len(found), key)
    return call if step else call.after(ready)


def _needed(operations: Sequence[Operation], begins: Sequence[int]) -> Mapping[Value, float]:
    """The position at which each value is first needed by more than a view; the end of the program for its results.

    A call needs the operands of all its operations where it begins, and makes their results where it ends.
    """
    end = float(len(operations))
    needed: dict[Value, float] = defaultdict(lambda: end)
    for begin, operation in zip(reversed(begins), reversed(operations), strict=True):
        when = float(begin)
        if _is_view(operation):
            when = min((needed[value] for value in operation.tensors), default=end)
        for value in operation.operands:
            needed[value] = min(needed[value], when)
    return needed


def _made(
    operations: Sequence[Operation], ends: Sequence[int], comms: Comms, needed: Mapping[Value, float]
) -> Mapping[Value, float]:
    """The position after which each value is made: a collective's result when it is needed, a view with its operand."""
    made: dict[Value, float] = defaultdict(lambda: -1.0)
    for end, operation in zip(ends, operations, strict=True):
        for value in operation.tensors:
            if operation in comms:
                made[value] = needed[value]
            elif _is_view(operation):
                made[value] = max((made[operand] for operand in operation.operands), default=float(end))
            else:
                made[value] = float(end)
    return made


def _leaving(operations: Sequence[Operation]) -> Mapping[Value, frozenset[Hashable]]:
    """How values leave their region: by the operators, of a branch by the operations.

    What is held of a bucket after a trip holds all of it, so that its results must be held equally long.
    """
    found: dict[Value, frozenset[Hashable]] = defaultdict(frozenset)
    for operation in reversed(operations):
        if operation.op in LEAVES:
            found[operation.operands[0]] |= {operation if operation.op is GIVE else operation.op}
        elif _is_view(operation):
            for value in operation.operands:
                found[value] |= frozenset().union(*map(found.__getitem__, operation.tensors))
    return found


def _is_view(operation: Operation) -> bool:
    """Whether an operation only names what is there in another way."""
    return operation.op is RELABEL or operation.is_view


def _key(
    plan: PlanData,
    operation: Operation,
    found: Sequence[Comm],
    step: int,
    leaving: Mapping[Value, frozenset[Hashable]],
) -> Hashable:
    """What a collective has in common with those of its bucket; None if it is launched alone."""
    if operation.op is REDISTRIBUTE:
        ends = plan.specs[operation.operands[0]], plan.specs[operation.tensors[0]]
        steps = [step for step in redistribution(*ends, plan.request.reduce_dtype) if step.is_collective]
        joins, dtype, reduction = KINDS[steps[step].kind].joins, steps[step].sent_dtype, steps[step].op
    elif operation.op in COLLECTIVES:
        collective = COLLECTIVES[operation.op]
        joins, dtype = collective.joins, operation.operands[0].meta.dtype
        reduction = collective.reduction(*operation.args[1:-1])
    else:
        return None
    comm, is_last = found[step], step + 1 == len(found)
    left = leaving[operation.tensors[0]] if is_last else frozenset()
    joined = joins and dtype in _DTYPES and reduction in (None, "sum") and comm.bytes > 0
    return (comm.kind, comm.axes, dtype, left) if joined else None
