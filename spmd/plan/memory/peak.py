"""The peak memory of a plan: the bytes that a rank holds at each point of the program, in order of execution.

Arguments stay alive until the end, because the caller holds them; donated ones until their last use. Constants and
results stay alive until the end too. Every other value is freed after its last use, as by the runtimes. Views share the
storage of their base.
"""

from __future__ import annotations

import enum
import itertools
import re
import weakref
from collections.abc import Callable, Mapping

import attrs

from spmd.core.mesh import Coordinate, Runtime
from spmd.core.spec import DTensorSpec, TensorMeta
from spmd.ir.graph import Operation, Value
from spmd.ir.source import Source
from spmd.ir.variants import Unevenness
from spmd.plan.data.plan import PlanData
from spmd.plan.local.variants import plan_at
from spmd.plan.memory.liveness import Buffer, Liveness, liveness_of


class Kind(enum.Enum):
    """The purpose that memory is held for."""

    INPUT = "input"
    CONSTANT = "constant"
    OUTPUT = "output"
    TEMPORARY = "temporary"


_FEW_COPIES = 2
"""How many times the bytes of its operands an operation makes without being named for it."""


@attrs.frozen
class Held:
    """One tensor of a rank that is held at the peak.

    Args:
        name: the value's name in the plan.
        kind: what it is held for; a result that is also an argument is an input.
        meta: shape and dtype on the rank.
        nbytes: its bytes.
        operation: the name of the operator that allocated it; None for inputs and constants.
        source: the line of the user's code.
        value: the value; None for a temporary inside a redistribution or a local implementation.
    """

    name: str
    kind: Kind
    meta: TensorMeta
    nbytes: int
    operation: str | None
    source: Source | None
    value: Value | None = attrs.field(repr=False, eq=False)

    def __str__(self) -> str:
        return self.line()

    def line(self, count: int = 1) -> str:
        """The tensor as text, with so many that are held for the same, as those of equal layers."""
        like = f"{count} like " if count > 1 else ""
        made = f" by {self.operation}" if self.operation else ""
        where = f" at {self.source}" if self.source else ""
        return f"{count * self.nbytes:>16,}  {self.kind.value:<9}  {like}{self.name} {self.meta}{made}{where}"


@attrs.frozen(eq=False, repr=False)
class Memory:
    """The memory of the rank that holds the largest shards.

    Args:
        peak: the most bytes held at once.
        operation: the operation that runs at the peak; None for a program without operations.
        source: the line of the user's code for it.
        held: the tensors held at the peak, the largest first.
        read, made: the bytes that the operation at the peak reads of others, and of those held that it made itself.
        timeline: the bytes held during each event of the liveness, in order of execution.
        operations: the operation of each event.
    """

    peak: int
    operation: Operation | None
    source: Source | None
    held: tuple[Held, ...]
    read: int
    made: int
    timeline: tuple[int, ...]
    operations: tuple[Operation, ...]

    @property
    def by_operation(self) -> Mapping[Operation, int]:
        """The most bytes held during each operation that runs something."""
        found: dict[Operation, int] = {}
        for operation, held in zip(self.operations, self.timeline, strict=False):  # without events there is one entry
            found[operation] = max(held, found.get(operation, 0))
        return found

    @property
    def by_kind(self) -> Mapping[Kind, int]:
        """Bytes held at the peak for each purpose."""
        return {kind: sum(item.nbytes for item in self.held if item.kind is kind) for kind in Kind}

    @property
    def place(self) -> str:
        """The operation at the peak and its line, as text; "the end" for a program without operations.

        Also how many times the bytes of its operands it has made, if it gathers, or its local implementation makes
        copies: more than twice.
        """
        if self.operation is None:
            return "the end"
        where = f" at {self.source}" if self.source else ""
        times = self.made / self.read if self.read else 0.0
        makes = f", which makes {times:.1f} times the shards that it reads" if times > _FEW_COPIES else ""
        return f"{self.operation.name}{where}{makes}"

    def largest(self, count: int = 8) -> str:
        """The `count` largest of the tensors held at the peak, one per line, and the total of the others.

        Three and more that one line of the user's code made alike, or inputs alike but for numbers in their names, as
        those of equal layers, are on one line.
        """
        alike: dict[Held, list[Held]] = {}
        for item in self.held:
            name = "" if item.operation else re.sub(r"\d+", "", item.name)
            alike.setdefault(attrs.evolve(item, name=name), []).append(item)
        groups = [part for same in alike.values() for part in ([same] if len(same) > 2 else [[item] for item in same])]
        groups.sort(key=lambda group: -len(group) * group[0].nbytes)
        lines = [f"  {group[0].line(len(group))}" for group in groups[:count]]
        rest = [item for group in groups[count:] for item in group]
        if rest:
            lines.append(f"  {sum(item.nbytes for item in rest):>16,}  in {len(rest)} more")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Memory(peak {self.peak:,} bytes per rank, at {self.place})"

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind.value} {nbytes:,}" for kind, nbytes in self.by_kind.items() if nbytes)
        return f"peak {self.peak:,} bytes per rank, at {self.place}: {kinds}\n{self.largest()}"


# A cache: the memory of one plan is needed several times.
_found: weakref.WeakKeyDictionary[PlanData, Memory] = weakref.WeakKeyDictionary()


def memory_of(plan: PlanData) -> Memory:
    """The memory of the rank that holds most under a plan: the peak, its operation, and the tensors held."""
    if plan not in _found:
        livenesses = (liveness_of(plan_at(plan, place), coordinate=place) for place in fullest(plan))
        found = [measure(liveness, plan.request.donated, plan.source) for liveness in livenesses]
        _found[plan] = max(found, key=lambda memory: memory.peak)
    return _found[plan]


def fullest(plan: PlanData) -> list[Coordinate]:
    """Coordinates of ranks of which one holds the most.

    These are coordinate zero, whose shards are the largest, and one for each program that differs inside manual
    regions. In a process of its own a rank with smaller shards may hold more, as it copies gathered parts of different
    sizes: there, along each mesh axis, also those with the last shard that is not empty.
    """
    variants = plan.request.graph.variants
    found = [(0,) * len(plan.mesh.names)]
    if variants is not None:
        found += [coordinate for coordinate, _ in variants.graphs.values()]
    if plan.mesh.runtime is Runtime.DISTRIBUTED:
        uneven = tuple(dict.fromkeys(spec for spec in plan.specs.values() if not spec.is_even))
        indices = [sorted({0}.union(*(_last_shards(spec, name) for spec in uneven))) for name in plan.mesh.names]
        key = Unevenness(plan.mesh, uneven).key
        found += {key(place): place for place in reversed(list(itertools.product(*indices)))}.values()
    return list(dict.fromkeys(found))


def _last_shards(spec: DTensorSpec, axis: str) -> set[int]:
    """The indices along a mesh axis of the last shards that are not empty."""
    found: set[int] = set()
    for size, axes in zip(spec.meta.shape, spec.dims, strict=True):
        sizes = {size} - {0}
        for name in axes:
            chunks = [(total, -(-total // spec.mesh.axis_size(name))) for total in sizes]
            if name == axis:
                found.update((total - 1) // chunk for total, chunk in chunks)
            sizes = {part for total, chunk in chunks for part in (chunk, (total - 1) % chunk + 1)}
    return found


def measure(liveness: Liveness, donated: frozenset[int], source: Callable[[Operation], Source | None]) -> Memory:
    """The memory of a program with this liveness.

    Args:
        liveness: the events.
        donated: positions of inputs that may be freed after their last use.
        source: the line of the user's code for an operation, as `PlanData.source`.
    """
    lives = lifetimes(liveness, donated)
    timeline = live_bytes(liveness, lives)
    index = max(range(len(timeline)), key=timeline.__getitem__)
    makers = {buffer: event.operation for event in liveness.events for buffer in event.writes}
    alive = [buffer for buffer, (first, last) in lives.items() if first <= index <= last and buffer.nbytes]
    held = [_held(buffer, liveness, makers, source) for buffer in alive]
    held.sort(key=lambda item: -item.nbytes)
    operation = liveness.events[index].operation if liveness.events else None
    where = source(operation) if operation else None
    operations = tuple(event.operation for event in liveness.events)
    reads = {buffer for event in liveness.events if event.operation is operation for buffer in event.reads}
    read = sum(buffer.nbytes for buffer in reads if makers.get(buffer) is not operation)
    made = sum(buffer.nbytes for buffer in alive if makers.get(buffer) is operation) if operation else 0
    return Memory(timeline[index], operation, where, tuple(held), read, made, tuple(timeline), operations)


def lifetimes(liveness: Liveness, donated: frozenset[int]) -> dict[Buffer, tuple[int, int]]:
    """The indices of the first and the last event during which each buffer is held.

    Args:
        liveness: the events.
        donated: positions of inputs that may be freed after their last use.
    """
    end = max(len(liveness.events) - 1, 0)
    last = dict.fromkeys((*liveness.inputs, *liveness.constants), 0)
    first = dict(last)
    for index, event in enumerate(liveness.events):
        for buffer in event.writes:
            first[buffer] = index
            last[buffer] = index
        for buffer in event.reads:
            last[buffer] = index
    kept = [buffer for position, buffer in enumerate(liveness.inputs) if position not in donated]
    for buffer in (*kept, *liveness.constants, *liveness.outputs):
        last[buffer] = end
    return {buffer: (first[buffer], last[buffer]) for buffer in first}


def live_bytes(liveness: Liveness, lives: Mapping[Buffer, tuple[int, int]]) -> list[int]:
    """The bytes held during each event; for a program without events, one entry: its inputs and constants."""
    changes = [0] * (max(len(liveness.events), 1) + 1)
    for buffer, (first, last) in lives.items():
        changes[first] += buffer.nbytes
        changes[last + 1] -= buffer.nbytes
    return list(itertools.accumulate(changes[:-1]))


def _held(
    buffer: Buffer, liveness: Liveness, makers: Mapping[Buffer, Operation], source: Callable[[Operation], Source | None]
) -> Held:
    operation = makers.get(buffer)
    if buffer in liveness.inputs:
        kind = Kind.INPUT
    elif buffer in liveness.constants:
        kind = Kind.CONSTANT
    else:
        kind = Kind.OUTPUT if buffer in liveness.outputs else Kind.TEMPORARY
    name = buffer.value.name if buffer.value is not None else f"inside {operation.name}" if operation else "?"
    made, where = (operation.name, source(operation)) if operation else (None, None)
    return Held(name, kind, buffer.meta, buffer.nbytes, made, where, buffer.value)
