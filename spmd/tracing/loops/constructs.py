"""Loops, branches and layers over closed programs: as what is recorded, and found again in a recorded program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import attrs
import torch

from spmd.core.spec import TensorMeta
from spmd.ir.effects import Effect
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.regions import (
    BRANCH,
    CARRY,
    END,
    GIVE,
    ITEM,
    LOOP,
    MERGE,
    NEXT,
    OTHERWISE,
    PROCEED,
    STACK,
    WHILE,
    Regions,
)
from spmd.ir.source import Source
from spmd.tracing.loops.per_rank import again, declare_constants

Record: TypeAlias = Callable[[Operation, Mapping[Value, Value]], tuple[Value | None, ...]]
"""Records an operation, with operands replaced, and returns new values for its results."""

_Made = TypeVar("_Made")
NUMBER = TensorMeta((), torch.int64)


@attrs.frozen(eq=False)
class Body:
    """A closed program.

    Args:
        graph: the program, without constants.
        call: the function that was traced, on tensors for the inputs, in another trace and under transforms: they may
            act on what its operators were made of, such as an autograd.Function. None where there is only the program.
        functions: the autograd.Functions of the user's that it has called, whose derivatives are theirs, in words.
    """

    graph: Graph
    call: Callable[..., Sequence[torch.Tensor]] | None = None
    functions: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Those of the program."""
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Those of the program."""
        return self.graph.outputs

    @property
    def may_run_again(self) -> bool:
        """Whether a second run changes nothing: it draws no random numbers, and calls nothing of the host."""
        repeatable = (None, Effect.REGION, Effect.COLLECTIVE)
        return all(operation.effect in repeatable for operation in self.graph.operations)


@attrs.frozen(eq=False)
class _Transformed:
    """A construct, with what transforms have made of it."""

    _made: dict[Any, Any] = attrs.field(factory=dict, init=False, repr=False)

    def once(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """What a transform makes of the construct, for all calls: `key` says by what it differs."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[no-any-return]


@attrs.frozen(eq=False)
class Loop(_Transformed):
    """A loop of known length.

    Args:
        body: its inputs are carries, items and fixed values; its outputs are the next carries and the results of a
            trip.
        carries, items: how many of them there are.
        trips: how often it runs.
        reverse: whether the last item comes first.
    """

    body: Body
    carries: int
    items: int
    trips: int
    reverse: bool = False

    @property
    def may_run_again(self) -> bool:
        """As of `Body`."""
        return self.body.may_run_again

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """The value in a body of each operand; None of a predicate."""
        return self.body.inputs

    @property
    def results(self) -> tuple[TensorMeta, ...]:
        """The shapes and dtypes of the last carries and of the stacked results."""
        metas = [value.meta for value in self.body.outputs]
        stacked = [TensorMeta((self.trips, *meta.shape), meta.dtype) for meta in metas[self.carries :]]
        return (*metas[: self.carries], *stacked)

    def record(self, record: Record, operands: Sequence[Value], source: Source | None) -> list[Value]:
        """Record it; returns the values of its results. Operands are initial carries, stacked items, fixed values."""
        call = Caller(record, source)
        turn = call(LOOP, self.trips, self.reverse, meta=NUMBER)
        inside = self.body.inputs
        carries = [call(CARRY, x, turn, meta=v.meta) for x, v in zip(operands, inside[: self.carries], strict=False)]
        given = list(operands[self.carries :])
        slices = inside[self.carries :][: self.items]
        items = [call(ITEM, x, turn, meta=v.meta) for x, v in zip(given, slices, strict=False)]
        made = call.all(self.body.graph, [*carries, *items, *given[self.items :]])
        left = [call(NEXT, new, carry, meta=carry.meta) for new, carry in zip(made, carries, strict=False)]
        for y, meta in zip(made[self.carries :], self.results[self.carries :], strict=True):
            left.append(call(STACK, y, turn, self.trips, meta=meta))
        call(END, turn, meta=NUMBER)
        return left


@attrs.frozen(eq=False)
class While:
    """A loop that runs as long as a predicate holds.

    Args:
        condition: its inputs are carries and fixed values; its output is the predicate.
        body: with the same inputs; its outputs are the next carries.
        carries: how many of them there are.
    """

    condition: Body
    body: Body
    carries: int

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """As of `Loop`."""
        return self.body.inputs

    @property
    def results(self) -> tuple[TensorMeta, ...]:
        """The shapes and dtypes of the last carries."""
        return tuple(value.meta for value in self.body.outputs)

    def record(self, record: Record, operands: Sequence[Value], source: Source | None) -> list[Value]:
        """As of `Loop`, without items."""
        call = Caller(record, source)
        turn = call(WHILE, meta=NUMBER)
        inside = self.body.inputs[: self.carries]
        carries = [call(CARRY, x, turn, meta=v.meta) for x, v in zip(operands, inside, strict=False)]
        given = [*carries, *operands[self.carries :]]
        (predicate,) = call.all(self.condition.graph, given)
        call(PROCEED, predicate, turn, meta=NUMBER)
        made = call.all(self.body.graph, given)
        left = [call(NEXT, new, carry, meta=carry.meta) for new, carry in zip(made, carries, strict=True)]
        call(END, turn, meta=NUMBER)
        return left


@attrs.frozen(eq=False)
class Branch(_Transformed):
    """Two programs of which one runs.

    Args:
        sides: what runs if the predicate holds, and what otherwise; both have the same inputs, all after the predicate
            among the operands, and outputs of the same shapes and dtypes.
        probability: that of the first side, by which the planner weighs times; None if it is not known.
    """

    sides: tuple[Body, Body]
    probability: float | None = None

    @property
    def may_run_again(self) -> bool:
        """As of `Body`."""
        return all(side.may_run_again for side in self.sides)

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """As of `Loop`."""
        return (None, *self.sides[0].inputs)

    @property
    def results(self) -> tuple[TensorMeta, ...]:
        """The shapes and dtypes of the results."""
        return tuple(value.meta for value in self.sides[0].outputs)

    def record(self, record: Record, operands: Sequence[Value], source: Source | None) -> list[Value]:
        """As of `Loop`; operands are the predicate and the inputs of both sides."""
        call = Caller(record, source)
        predicate, *given = operands
        case = side = call(BRANCH, predicate, self.probability, meta=NUMBER)
        left = []
        for number, program in enumerate(self.sides):
            side = call(OTHERWISE, case, meta=NUMBER) if number else case
            left.append([call(GIVE, x, side, meta=x.meta) for x in call.all(program.graph, given)])
        call(END, case, meta=NUMBER)
        return [call(MERGE, x, y, meta=x.meta) for x, y in zip(*left, strict=True)]


@attrs.frozen(eq=False)
class Subprogram(_Transformed):
    """A program that is called several times, each time with other operands.

    Args:
        body: the program.
    """

    body: Body

    @property
    def may_run_again(self) -> bool:
        """As of `Body`."""
        return self.body.may_run_again

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """As of `Loop`."""
        return self.body.inputs

    @property
    def results(self) -> tuple[TensorMeta, ...]:
        """The shapes and dtypes of the results."""
        return tuple(value.meta for value in self.body.outputs)

    def record(self, record: Record, operands: Sequence[Value], source: Source | None) -> list[Value]:
        """As of `Loop`: its operations."""
        return Caller(record, source).all(self.body.graph, operands)


Construct: TypeAlias = Loop | While | Branch | Subprogram


def with_equal_inputs(shared: int, first: Body, second: Body) -> tuple[Body, Body]:
    """Two programs with the inputs of both: first those they share, then those of the first and of the second."""
    own = first.inputs[shared:], second.inputs[shared:]
    added = [tuple(map(again, values)) for values in own]
    calls, start, end = (first.call, second.call), shared + len(own[0]), len(first.inputs)
    return (
        Body(
            attrs.evolve(first.graph, inputs=(*first.inputs, *added[1])),
            calls[0] and (lambda *tensors: calls[0](*tensors[:end])),  # type: ignore[misc]
            first.functions,
        ),
        Body(
            attrs.evolve(second.graph, inputs=(*second.inputs[:shared], *added[0], *own[1])),
            calls[1] and (lambda *tensors: calls[1](*tensors[:shared], *tensors[start:])),  # type: ignore[misc]
            second.functions,
        ),
    )


@attrs.frozen
class Caller:
    """Records calls at one line of the user's."""

    record: Record
    source: Source | None

    def __call__(self, op: torch._ops.OpOverload, *args: Any, meta: TensorMeta) -> Value:
        (value,) = self.record(Operation(op, args, {}, (Value(op._opname.strip("_"), meta),), self.source), {})
        assert value is not None
        return value

    def all(self, graph: Graph, inputs: Sequence[Value]) -> list[Value]:
        """Record the operations of a program; returns the values of its outputs."""
        known = dict(zip(graph.inputs, inputs, strict=True))
        for operation in graph.operations:
            pairs = zip(operation.results, self.record(operation, known), strict=True)
            made = {old: new for old, new in pairs if old is not None and new is not None}
            declare_constants(made)
            known.update(made)
        return [known[value] for value in graph.outputs]


@attrs.frozen(eq=False)
class Recorded:
    """A construct in a recorded program: with its operands there, and its results."""

    construct: Construct
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    source: Source | None


def steps(graph: Graph) -> list[Operation | Recorded]:
    """The operations of a program outside of its regions and the constructs at its top, in order."""
    found: list[Operation | Recorded] = []
    position = 0
    while position < len(graph.operations):
        whole = graph.regions.whole(graph.operations[position])
        found.append(_recorded(graph.regions, whole) if len(whole) > 1 else whole[0])
        position += len(whole)
    return found


def _recorded(regions: Regions[Operation, Value], whole: Sequence[Operation]) -> Recorded:
    """A loop or a branch as a construct."""
    begin = whole[0]
    end = whole.index(regions.end(begin))
    inside = whole[1:end]
    if begin.op is BRANCH:
        return _branch(regions, begin, inside, whole[end + 1 :])
    carries, items = regions.members(begin, CARRY), regions.members(begin, ITEM)
    nexts = {operation.operands[1]: operation for operation in regions.members(begin, NEXT)}
    stacks = regions.members(begin, STACK)
    own = {begin.tensors[0], *(o.tensors[0] for o in (*carries, *items))}
    ends = [nexts[carry.tensors[0]] for carry in carries]
    outputs = [operation.operands[0] for operation in (*ends, *stacks)]
    body = [o for o in inside if not (o.op in (CARRY, ITEM, NEXT, STACK) and o.operands[1] in own)]
    given = tuple(o.tensors[0] for o in (*carries, *items))
    initial = tuple(o.operands[0] for o in (*carries, *items))
    left = tuple(o.tensors[0] for o in (*ends, *stacks))
    if begin.op is LOOP:
        fixed = _outside([body], outputs, given)
        program = Graph((*given, *fixed), (), tuple(body), tuple(outputs))
        return Recorded(
            Loop(Body(program), len(carries), len(items), *begin.args), (*initial, *fixed), left, begin.source
        )
    at = next(number for number, o in enumerate(body) if o.op is PROCEED and o.operands[1] is begin.tensors[0])
    condition, rest = body[:at], body[at + 1 :]
    predicate = body[at].operands[0]
    both = [*condition, *rest]  # what the condition has computed, the body may read
    fixed = _outside([both], [*outputs, predicate], given)
    programs = (
        Body(Graph((*given, *fixed), (), tuple(condition), (predicate,))),
        Body(Graph((*given, *fixed), (), tuple(_needed(both, outputs)), tuple(outputs))),
    )
    return Recorded(While(*programs, len(carries)), (*initial, *fixed), left, begin.source)


def _needed(operations: Sequence[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """The operations that outputs depend on, and those with effects."""
    live, kept = set(outputs), []
    for operation in reversed(operations):
        if operation.effect is not None or not live.isdisjoint(operation.tensors):
            live.update(operation.operands)
            kept.append(operation)
    return kept[::-1]


def _branch(
    regions: Regions[Operation, Value], begin: Operation, inside: Sequence[Operation], merges: Sequence[Operation]
) -> Recorded:
    case = begin.tensors[0]
    at = next(number for number, o in enumerate(inside) if o.op is OTHERWISE and o.operands[0] is case)
    sides = [list(inside[:at]), list(inside[at + 1 :])]
    given = [{o.tensors[0]: o.operands[0] for o in regions.members(opens, GIVE)} for opens in (begin, inside[at])]
    outputs = [[held[o.operands[side]] for o in merges] for side, held in enumerate(given)]
    bodies = [[o for o in side if o.tensors[0] not in held] for side, held in zip(sides, given, strict=True)]
    fixed = _outside(bodies, [*outputs[0], *outputs[1]], ())
    programs = [Body(Graph(fixed, (), tuple(body), tuple(out))) for body, out in zip(bodies, outputs, strict=True)]
    results = tuple(o.tensors[0] for o in merges)
    predicate, probability = begin.args
    return Recorded(Branch((programs[0], programs[1]), probability), (predicate, *fixed), results, begin.source)


def _outside(
    bodies: Sequence[Sequence[Operation]], outputs: Sequence[Value], given: Sequence[Value]
) -> tuple[Value, ...]:
    """What bodies read of what is around them."""
    made = {*given, *(value for body in bodies for o in body for value in o.tensors)}
    read = [value for body in bodies for o in body for value in o.operands]
    return tuple(value for value in dict.fromkeys((*read, *outputs)) if value not in made)
