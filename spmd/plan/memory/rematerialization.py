"""Rematerialization: running a cheap operation twice instead of holding its result in memory.

Such operations are the all_gather of a parameter, casts and constants. A value that is held across the memory peak but
not read there can be freed after its last use before the peak, and be computed again just before its next use. Its
operands must then be held until that point, which costs memory unless they are held anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.simplify import eliminate_dead
from spmd.lowering.repetitions import is_cheap
from spmd.plan.memory.liveness import Buffer, Liveness


@attrs.frozen(eq=False)
class Rematerialization:
    """An operation that may be run a second time.

    Args:
        operation: the operation.
        buffer: the buffer that it allocates.
        next_use: position of the first operation after the peak that reads the buffer.
        freed: bytes by which running it twice lowers the memory at the peak.
    """

    operation: Operation
    buffer: Buffer
    next_use: int
    freed: int


@attrs.frozen(eq=False)
class Rewritten:
    """A program in which some operations run twice.

    Args:
        operations: in order of execution.
        origins: for each operation, the one of the original program that it comes from.
        copies: for each new value, the original value that it recomputes.
    """

    operations: tuple[Operation, ...]
    origins: Mapping[Operation, Operation]
    copies: Mapping[Value, Value]


def candidates(graph: Graph, liveness: Liveness, peak: Operation) -> Iterator[Rematerialization]:
    """The operations that may be run a second time to lower the memory at the peak.

    The second run stands in the same trip of a loop, or the same side of a branch, as the first.

    Args:
        graph: a planned program without list operators.
        liveness: its liveness.
        peak: the operation at the peak.
    """
    position, regions = {operation: index for index, operation in enumerate(graph.operations)}, graph.regions
    at = position[peak]
    uses: dict[Buffer, list[tuple[int, int]]] = {}
    for operation in graph.operations:
        for value in operation.operands:
            ends = regions.needed_at(operation, value), regions.held_until(operation, value)
            uses.setdefault(liveness.buffers[value], []).append((position[ends[0]], position[ends[1]]))
    always = {*liveness.inputs, *liveness.constants, *liveness.outputs}
    for operation in graph.operations[:at]:
        if not is_cheap(operation):
            continue
        buffer = liveness.buffers[operation.tensors[0]]
        used = uses.get(buffer, [])
        late = [start for start, _ in used if start > at]
        is_read = any(start <= at <= end for start, end in used)
        if buffer in always or buffer.value is not operation.tensors[0] or not late or is_read:
            continue
        sources = {liveness.buffers[value] for value in operation.operands}
        kept = [other for other in sources if other not in always and max(end for _, end in uses[other]) < at]
        freed = buffer.nbytes - sum(other.nbytes for other in kept)
        if freed > 0:
            yield Rematerialization(operation, buffer, min(late), freed)


def rewrite(graph: Graph, liveness: Liveness, peak: Operation, chosen: Sequence[Rematerialization]) -> Rewritten:
    """The program in which each chosen operation runs again after the peak, just before its buffer's next use.

    Views of the buffer are computed again too.

    Args:
        graph: a planned program without list operators.
        liveness: its liveness.
        peak: the operation at the peak.
        chosen: candidates for this peak, none of which reads the buffer of another.
    """
    at, regions = graph.operations.index(peak), graph.regions
    second: dict[Value, Value] = {}
    inserted: dict[int, list[Operation]] = {}
    origins: dict[Operation, Operation] = {}
    views: dict[Buffer, list[Operation]] = {item.buffer: [] for item in chosen}
    for operation in graph.operations[: at + 1]:
        aliased = {liveness.buffers[value] for value in operation.tensors}
        for buffer in aliased & views.keys():
            if buffer.value not in operation.tensors:
                views[buffer].append(operation)
    for item in chosen:
        own = regions.around(item.operation)
        for operation in (item.operation, *(view for view in views[item.buffer] if regions.around(view) is own)):
            copy = _copy(operation, second)
            origins[copy] = operation
            inserted.setdefault(item.next_use, []).append(copy)
    operations: list[Operation] = []
    for index, operation in enumerate(graph.operations):
        operations += inserted.get(index, [])
        placed = operation.substitute(second) if index > at else operation
        origins[placed] = operation
        operations.append(placed)
    live = eliminate_dead(attrs.evolve(graph, operations=tuple(operations))).operations  # some views are not used
    return Rewritten(live, origins, {new: old for old, new in second.items()})


def _copy(operation: Operation, second: dict[Value, Value]) -> Operation:
    results = tuple(None if value is None else Value(f"{value.name}_again", value.meta) for value in operation.results)
    copy = attrs.evolve(operation.substitute(second), results=results)
    second.update((old, new) for old, new in zip(operation.results, results, strict=True) if old and new)
    return copy
