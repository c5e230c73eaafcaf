"""`torch.utils.checkpoint` in a trace: a backward pass computes what it reads of a region again.

The function of a region runs once, and its operations are marked. Afterwards each operation of a backward pass that
reads a value of the region gets a second computation of it, which stands just before. So `torch.func` transforms work,
which torch's own checkpoints refuse. Values that the forward pass reads outside of the region are held in any case, and
operations with effects run once: a second computation has the same random numbers, and no collective runs twice. A
loop or a branch in a region is computed again as a whole, if it draws no random numbers (`spmd.tracing.loops.calls`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import attrs
import torch
import torch.utils.checkpoint as torch_checkpoint

from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.names import Namer
from spmd.ir.recompute import RECOMPUTE
from spmd.tracing.source import as_backward

Holds = Callable[[Operation], bool]
"""Whether the results of an operation in a region are held for the backward pass."""


class Checkpoints:
    """The checkpointed regions of a trace, and which operations are in them or in a backward pass.

    Attributes:
        inside: the numbers of the regions that an operation is in, outermost first, for each that is in any.
        backward: the operations of backward passes.
    """

    def __init__(self) -> None:
        self.inside: dict[Operation, tuple[int, ...]] = {}
        self.backward: set[Operation] = set()
        self._open: tuple[tuple[int, Holds], ...] = ()
        self._count = 0

    @property
    def count(self) -> int:
        """How many regions there have been."""
        return self._count

    @property
    def is_open(self) -> bool:
        """Whether operations are recorded in a region now."""
        return bool(self._open)

    def new(self) -> int:
        """The number of one more region."""
        self._count += 1
        return self._count

    @contextlib.contextmanager
    def region(self, holds: Holds = lambda operation: False) -> Iterator[None]:
        """A context whose operations are those of one more region."""
        before = self._open
        self._open = (*before, (self.new(), holds))
        try:
            yield
        finally:
            self._open = before

    def note(self, operation: Operation) -> None:
        """Mark an operation that has just been recorded."""
        if not self._count:
            return
        if torch._C._current_autograd_node() is not None:  # type: ignore[attr-defined]
            self.backward.add(operation)
        if operation.effect is None and not any(holds(operation) for _, holds in self._open):
            self.inside[operation] = tuple(number for number, _ in self._open)


def is_checkpointed() -> bool:
    """Whether this call stands in a checkpointed region of the trace that is running."""
    regions = _regions.get()
    return regions is not None and regions.is_open


_regions: ContextVar[Checkpoints | None] = ContextVar("spmd_checkpointed_regions", default=None)
_without_reentry = torch_checkpoint._checkpoint_without_reentrant_generator
_Reentrant = torch_checkpoint.CheckpointFunction


@contextlib.contextmanager
def checkpoints(regions: Checkpoints) -> Iterator[None]:
    """A context manager in which `torch.utils.checkpoint` marks regions, if this thread calls it."""
    token = _regions.set(regions)
    try:
        yield
    finally:
        _regions.reset(token)


def _region_or_checkpoint(function: Any, preserve: bool, context: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """In a trace a region, else torch's own checkpoint."""
    regions = _regions.get()
    if regions is None:
        yield from _without_reentry(function, preserve, context, *args, **kwargs)
        return
    forward, _ = context()
    policy = getattr(forward, "policy_fn", None)  # of selective checkpoints
    if policy is None:
        with regions.region(), forward:
            yield
    else:
        with regions.region(_by_policy(policy)):
            yield


class _ReentrantRegion(_Reentrant):
    """In a trace a region, else torch's own reentrant checkpoint."""

    @staticmethod
    def apply(function: Any, preserve: bool, *args: Any) -> Any:  # type: ignore[override]
        regions = _regions.get()
        if regions is None:
            return _Reentrant.apply(function, preserve, *args)
        with regions.region():
            return function(*args)


# Once, and not in each trace: other threads may use checkpoints meanwhile.
torch_checkpoint._checkpoint_without_reentrant_generator = _region_or_checkpoint  # type: ignore[assignment]
torch_checkpoint.CheckpointFunction = _ReentrantRegion  # type: ignore[misc]


def _by_policy(policy: Callable[..., Any]) -> Holds:
    """What a policy of `torch.utils.checkpoint.create_selective_checkpoint_contexts` saves."""
    saves = torch_checkpoint.CheckpointPolicy.MUST_SAVE, torch_checkpoint.CheckpointPolicy.PREFER_SAVE
    context = torch_checkpoint.SelectiveCheckpointContext(is_recompute=False)

    def holds(operation: Operation) -> bool:
        call = operation.call()
        return policy(context, operation.op, *call.args, **call.kwargs) in saves

    return holds


def recompute(graph: Graph, regions: Checkpoints, namer: Namer) -> Graph:
    """The program in which backward passes compute what they read of checkpointed regions again."""
    depth = 0
    while any(len(numbers) > depth for numbers in regions.inside.values()):
        operations = _Recomputation(graph, regions, namer, depth).operations()
        graph = attrs.evolve(graph, operations=operations)
        depth += 1
    return graph


class _Recomputation:
    """Second computations for the regions of one depth of nesting, outermost first: a copy has the regions inside."""

    def __init__(self, graph: Graph, regions: Checkpoints, namer: Namer, depth: int) -> None:
        self._graph, self._regions, self._namer, self._depth = graph, regions, namer, depth
        self._own = {o: numbers[depth] for o, numbers in regions.inside.items() if len(numbers) > depth}
        self._position = {operation: index for index, operation in enumerate(graph.operations)}
        self._producers = graph.producers
        self._held = self._held_values()
        self._inputs, self._dependent = _aliases_of_inputs(graph), _dependent_on_inputs(graph)
        self._copies: dict[Value, Value] = {}
        self._inner: dict[int, int] = {}

    def operations(self) -> tuple[Operation, ...]:
        """The operations of the program, and the second computations before those that read them."""
        placed: list[Operation] = []
        for operation in self._graph.operations:
            if operation in self._regions.backward:
                needed = [v for v in operation.operands if self._is_recomputed(v, operation)]
                placed += self._second(needed)
                changed = operation.substitute({value: self._copies[value] for value in needed})
                self._take_marks(operation, changed)
                operation = changed
            placed.append(operation)
        return tuple(placed)

    def _number(self, value: Value) -> int | None:
        """The number of the region that computes a value; None if none does."""
        producer = self._producers.get(value)
        return None if producer is None else self._own.get(producer)

    def _held_values(self) -> set[Value]:
        """The values that are held in any case: results, and what the forward pass reads outside of their region."""
        held = set(self._graph.outputs)
        for operation in self._graph.operations:
            if operation not in self._regions.backward:
                own = self._own.get(operation)
                held.update(value for value in operation.operands if self._number(value) != own)
        return held

    def _is_recomputed(self, value: Value, reader: Operation) -> bool:
        number = self._number(value)
        if number is None or number == self._own.get(reader):
            return False
        return value not in self._held and value not in self._inputs and value in self._dependent

    def _second(self, values: Iterable[Value]) -> Iterator[Operation]:
        """The operations that compute values of regions once more, as far as none has yet."""
        needed: set[Operation] = set()
        pending = [value for value in values if value not in self._copies]
        while pending:
            producer = self._producers[pending.pop()]
            if producer in needed:
                continue
            needed.add(producer)
            pending += [value for value in producer.operands if self._is_copied(value, self._own[producer])]
        for operation in sorted(needed, key=self._position.__getitem__):
            yield from self._copy(operation)

    def _is_copied(self, value: Value, number: int) -> bool:
        """Whether the second computation of a region has to compute a value of it that has not been copied yet."""
        if self._number(value) != number or value in self._copies:
            return False
        return value not in self._held and value not in self._inputs and value in self._dependent

    def _copy(self, operation: Operation) -> Iterator[Operation]:
        number = self._own[operation]
        source = None if operation.source is None else as_backward(operation.source)
        copied = {v: self._copies[v] for v in operation.operands if self._number(v) == number and v in self._copies}
        others = [v for v in dict.fromkeys(operation.operands) if v in self._dependent and v not in copied]
        apart = [value for value in others if value not in self._inputs]
        for value in apart or ([] if copied else others):
            copied[value] = self._fresh(value)
            yield Operation(RECOMPUTE, (value, number), {}, (copied[value],), source)
        results = tuple(None if value is None else self._fresh(value) for value in operation.results)
        copy = attrs.evolve(operation.substitute(copied), results=results, source=source)
        pairs = zip(operation.results, results, strict=True)
        self._copies.update((old, new) for old, new in pairs if old is not None and new is not None)
        self._take_marks(operation, copy)
        yield copy

    def _fresh(self, value: Value) -> Value:
        return Value(self._namer.fresh(f"{value.name}_again"), value.meta)

    def _take_marks(self, old: Operation, new: Operation) -> None:
        """Mark the new operation as the old one is; a copy has regions inside of its own."""
        if old is new:
            return
        is_copy = new.results != old.results
        if old in self._regions.backward:
            self._regions.backward.add(new)
        numbers = self._regions.inside.get(old)
        if numbers is None:
            return
        if is_copy:
            inner = [self._inner.setdefault(number, self._regions.new()) for number in numbers[self._depth + 1 :]]
            numbers = (*numbers[: self._depth + 1], *inner)
        self._regions.inside[new] = numbers


def _aliases_of_inputs(graph: Graph) -> set[Value]:
    """The inputs and constants of a program, and views of them."""
    found = {*graph.inputs, *(value for value, _ in graph.constants)}
    for operation in graph.operations:
        if operation.is_view and operation.operands[0] in found:
            found.update(operation.tensors)
    return found


def _dependent_on_inputs(graph: Graph) -> set[Value]:
    """The values of which some input, or a random number, is part: others are cheap and may be folded."""
    found = set(graph.inputs)
    for operation in graph.operations:
        if operation.effect is not None or not found.isdisjoint(operation.operands):
            found.update(operation.tensors)
    return found
