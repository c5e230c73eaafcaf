"""Loops and branches of a program: operators that begin and end them in its flat list of operations.

What stands between `loop` and its `end` runs once a trip; what stands between `branch`, `otherwise` and `end` runs as
the predicate says. A pass that looks at operators one by one sees those of a body like any others, once.

* `loop(trips, reverse)` begins a loop of known length, `while_()` one that `proceed(predicate, turn)` leaves. Both
  return the number of the trip, `turn`, and so stand for the loop in the arguments of the others.
* `carry(init, turn)` is what the trip before left: of the first one `init`. `next_(new, carry)` says what it is in the
  next trip; its result is that of the last one, after the loop.
* `item(xs, turn)` is `xs[turn]`; the result of `stack(y, turn, trips)` has the `y` of all trips, after the loop.
* `branch(predicate, probability)` and `otherwise(case)` begin the two sides, which `give(x, side)` their results;
  `merge(x, y)`, after the end, is that of the side which ran.

The results of `next_`, `stack` and `give` belong to what is around the region; all others of a region are read inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

import torch

from spmd.ir.effects import Effect, declare_effect

_LIBRARY = torch.library.Library("spmd", "FRAGMENT")


def _define(schema: str, function: Callable[..., Any]) -> torch._ops.OpOverload:
    """An operator that computes what `function` does; runtimes have code of their own for it."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.spmd, name).default  # type: ignore[no-any-return]


def _number(*_: Any) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


def _same(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.alias.default(x)


def _first(xs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return xs.select(0, 0) if xs.shape[0] else xs.new_empty(xs.shape[1:])


LOOP = _define("loop(int trips, bool reverse) -> Tensor", _number)
WHILE = _define("while_() -> Tensor", _number)
PROCEED = _define("proceed(Tensor predicate, Tensor turn) -> Tensor", _number)
CARRY = _define("carry(Tensor(a) init, Tensor turn) -> Tensor(a)", _same)
NEXT = _define("next_(Tensor(a) new, Tensor carry) -> Tensor(a)", _same)
ITEM = _define("item(Tensor(a) xs, Tensor turn) -> Tensor(a)", _first)
STACK = _define(
    "stack_(Tensor y, Tensor turn, int trips) -> Tensor", lambda y, turn, trips: y.new_empty((trips, *y.shape))
)
BRANCH = _define("branch(Tensor predicate, float? probability=None) -> Tensor", _number)
OTHERWISE = _define("otherwise(Tensor case) -> Tensor", _number)
GIVE = _define("give(Tensor(a) x, Tensor side) -> Tensor(a)", _same)
MERGE = _define("merge(Tensor x, Tensor y) -> Tensor", lambda x, y: torch.ops.aten.clone.default(x))
END = _define("end(Tensor turn) -> Tensor", _number)

BEGINS = (LOOP, WHILE, BRANCH)
LEAVES = (NEXT, STACK, GIVE)
"""The operators whose results belong to what is around the region in which they stand."""
TIED = {NEXT: (1,), MERGE: (0, 1)}
"""By operator, the positions of operands that it takes as they are made: between two trips, or between the sides of a
branch and its end, nothing can be resharded."""
BOUNDS = (*BEGINS, PROCEED, OTHERWISE, END)
"""The operators that begin, divide and end regions."""

STRUCTURE = frozenset({*BOUNDS, *LEAVES, CARRY, ITEM, MERGE})
"""All operators of loops and branches: statements of a program, where others are calls."""

for _op in BOUNDS:
    declare_effect(_op, Effect.REGION)


class _Operation(Protocol):
    """What this module reads of an operation of a program; of `spmd.ir.graph`, which imports it."""

    @property
    def op(self) -> Any:
        """The operator."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Its arguments."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Its results."""


Op = TypeVar("Op", bound=_Operation)
V = TypeVar("V", bound=Hashable)


def stretches(operations: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
    """The operations between bounds of regions, which run one after the other or not at all; each bound by itself."""
    for is_bound, stretch in groupby(operations, lambda operation: operation.op in BOUNDS):
        if is_bound:
            yield from ((operation,) for operation in stretch)
        else:
            yield tuple(stretch)


class Regions(Generic[Op, V]):
    """The regions of a program, each named by the operation that opens it: a `BEGINS`, or `otherwise` of a second side.

    Args:
        operations: those of the program, in order of execution.
    """

    def __init__(self, operations: Sequence[Op]) -> None:
        self._block: dict[Op, Op] = {}
        self._members: dict[Op, list[Op]] = {}
        self._begin: dict[Op, Op] = {}
        self._end: dict[Op, Op] = {}
        self._home: dict[V, Op] = {}
        self._operations = operations
        self._index: dict[Op, int] = {}
        found: list[Op] = []
        if any(operation.op in BEGINS for operation in operations):
            self._index = {operation: index for index, operation in enumerate(operations)}
            for operation in operations:
                self._add(operation, found)

    def _add(self, operation: Op, found: list[Op]) -> None:
        if operation.op in (END, OTHERWISE):
            begin = self._begin[found.pop()]
            self._end[begin] = operation
            if operation.op is OTHERWISE:
                self._begin[operation] = begin
        if found:
            self._block[operation] = found[-1]
            self._members[found[-1]].append(operation)
        if operation.op in (*BEGINS, OTHERWISE):
            self._begin.setdefault(operation, operation)
            self._members[operation] = []
            found.append(operation)
        if (home := self.around(found[-1]) if operation.op in LEAVES else found[-1] if found else None) is not None:
            self._home.update(dict.fromkeys(operation.tensors, home))

    def __bool__(self) -> bool:
        return bool(self._members)

    def around(self, operation: Op) -> Op | None:
        """What opens the innermost region in which an operation stands; the bounds of a region stand around it."""
        return self._block.get(operation)

    def home(self, value: V) -> Op | None:
        """What opens the region inside of which a value can be read; None if everywhere."""
        return self._home.get(value)

    def begin(self, value: V) -> Op | None:
        """What begins the loop or branch inside of which a value can be read; None if everywhere."""
        home = self.home(value)
        return None if home is None else self._begin[home]

    def end(self, opens: Op) -> Op:
        """The end of the loop or branch that an operation opens a side of."""
        return self._end[self._begin[opens]]

    def members(self, opens: Op, *ops: torch._ops.OpOverload) -> list[Op]:
        """The operations that stand in a region itself and call some operators; by default all of them."""
        return [operation for operation in self._members[opens] if not ops or operation.op in ops]

    def of_sides(self, begin: Op, *ops: torch._ops.OpOverload) -> list[Op]:
        """The members of both sides of a branch, or of a loop."""
        sides = [side for side, opens in self._begin.items() if opens is begin]
        return [operation for side in sides for operation in self.members(side, *ops)]

    def inside(self, begin: Op) -> list[Op]:
        """All operations between the bounds of a loop or a branch."""
        found = []
        for operation in self.of_sides(begin):
            found += [operation, *(self.inside(operation) if operation.op in BEGINS else ())]
        return found

    def whole(self, operation: Op) -> tuple[Op, ...]:
        """A loop or a branch, by what begins it, with its end and the merges behind that; any other operation alone."""
        if operation.op not in BEGINS:
            return (operation,)
        end = self._index[self._end[operation]] + 1
        while operation.op is BRANCH and end < len(self._operations) and self._operations[end].op is MERGE:
            end += 1
        return tuple(self._operations[self._index[operation] : end])

    def path(self, operation: Op) -> list[Op]:
        """What opens the regions in which an operation stands, the innermost first."""
        found = []
        block = self.around(operation)
        while block is not None:
            found.append(block)
            block = self.around(block)
        return found

    def trips(self, operation: Op) -> int:
        """How often an operation runs at most; a loop whose length is data counts once."""
        return math.prod(opens.args[0] for opens in self.path(operation) if opens.op is LOOP)

    def runs(self, operation: Op) -> float:
        """How often an operation runs on average; both sides of a branch count whose probability is not known."""
        return math.prod(map(self._runs_inside, self.path(operation)))

    def _runs_inside(self, opens: Op) -> float:
        """How often what stands in a region runs on average, each time that its loop or branch does."""
        if opens.op is LOOP:
            return float(opens.args[0])
        begin = self._begin[opens]
        probability = begin.args[1] if begin.op is BRANCH else None
        return 1.0 if probability is None else probability if opens is begin else 1.0 - probability

    def most(self, amounts: Mapping[Op, float]) -> float:
        """The sum of amounts of operations; of a branch, that of the side with more."""
        sums, begins, first = [0.0], list[Op](), list[float]()
        for operation in self._operations:
            if operation.op in BEGINS:
                begins.append(operation)
                sums.append(0.0)
            elif operation.op is OTHERWISE:
                first.append(sums.pop())
                sums.append(0.0)
            elif operation.op is END:
                inside = sums.pop()
                sums[-1] += max(inside, first.pop()) if begins.pop().op is BRANCH else inside
            sums[-1] += amounts.get(operation, 0.0)
        return sums[0]

    def needed_at(self, operation: Op, value: V) -> Op:
        """The operation before which a value is made that another one reads: the beginning of a region around that."""
        home, place = self.home(value), operation
        for opens in self.path(operation):
            if opens is home:
                break
            place = self._begin[opens]
        return place

    def held_until(self, operation: Op, value: V) -> Op:
        """As `reads_at`; what leaves a region is held until its end, too."""
        return self.leaves(operation) if operation.op in LEAVES else self.reads_at(operation, value)

    def runs_of(self, value: V) -> float:
        """How often a value is made on average."""
        home = self.home(value)
        return 1.0 if home is None else self.runs(home) * self._runs_inside(home)

    def leaves(self, operation: Op) -> Op:
        """The end of the region that a result leaves."""
        return self.end(self._block[operation])

    def reads_at(self, operation: Op, value: V) -> Op:
        """The operation up to which a value is held that another one reads: the end of a loop around that one only.

        What a loop begins with, it does not hold.
        """
        home, place = self.home(value), operation
        for opens in self.path(operation):
            if opens is home:
                break
            place = opens if operation.op is CARRY and place is operation else self.end(opens)
        return place
