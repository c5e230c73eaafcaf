"""What an explanation says: the alternatives of a value's producer, its neighbours, and the specs given for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import attrs

from spmd.core.placement import Placement
from spmd.errors import PlanError
from spmd.inspect.questions.replay import Figures
from spmd.ir.graph import Operation, Value
from spmd.ir.source import Source
from spmd.plan.cost.suspicious_moves import SuspiciousMove
from spmd.rules.strategy import Strategy


@attrs.frozen
class Pin:
    """A spec that the user gave: `in_specs`, `out_specs` or a constraint, and the constraint's line."""

    what: str
    spec: str
    source: Source | None

    def __str__(self) -> str:
        return f"{self.what}: {self.spec}" + (f" at {self.source}" if self.source else "")


@attrs.frozen
class Moved:
    """A collective that an alternative needs: the value's name, the kind, bytes sent per rank, predicted seconds."""

    value: str
    kind: str
    bytes: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value} ({self.bytes:,.0f} bytes)"


@attrs.frozen(eq=False)
class Alternative:
    """One strategy of an operation on one mesh axis.

    Args:
        label: the factor that it shards, or "replicate", "partial", "local body", "given".
        strategy: the strategy, over logical dims.
        operands, results: the specs that it requires and produces, with the other axes as planned.
        local_seconds: the operation's own time, with the collectives inside its local implementation.
        moves: the collectives that bring its operands to the specs that it requires, and its results to those that
            their consumers require.
        extra_seconds: how much longer a step takes than with the strategy that was chosen, with all collectives on both
            sides, also those of other consumers; 0 for that one, infinite for one that `keep_sharded` rules out.
        chosen: whether it is the plan's strategy.
        replanned: the increase of a step's cost if the axis is planned again with this strategy; None unless `exact`.
        shards: what the label stands for where it is an atom: `the 128 of dim 0 (16·128) of mm`; else "".
    """

    label: str
    strategy: Strategy
    operands: tuple[str, ...]
    results: tuple[str, ...]
    local_seconds: float
    moves: tuple[Moved, ...]
    extra_seconds: float
    chosen: bool
    replanned: Figures | None = None
    shards: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """What alternatives are sorted by: the chosen one first, then by exact figures where there are some."""
        return not self.chosen, self.extra_seconds if self.replanned is None else self.replanned.seconds

    @property
    def seconds(self) -> float:
        """Predicted seconds of local time and collectives."""
        return self.local_seconds + sum(move.seconds for move in self.moves)

    def __str__(self) -> str:
        takes = f"{', '.join(self.operands)} -> {', '.join(self.results)}"
        price = "chosen" if self.chosen else _price(self.extra_seconds)
        if self.replanned is not None and not self.chosen:
            sent = f", {self.replanned.bytes:+,.0f} bytes" if math.isfinite(self.replanned.bytes) else ""
            price = f"{_price(self.replanned.seconds)}{sent} ({price} with all else as planned)"
        needs = f"  needs {', '.join(map(str, self.moves))}" if self.moves else ""
        return f"{price:>12}  {self.label}: {takes}{needs}"


def _price(seconds: float) -> str:
    return f"{1e6 * seconds:+.3g} us" if math.isfinite(seconds) else "impossible"


@attrs.frozen
class Neighbour:
    """An operand of an operation, or a consumer of its result.

    Args:
        name: the name of the operand, or of the value that the consumer computes; or the pin that is there.
        has: the spec in which the operand is produced; None for a consumer.
        wants: the spec that the operation requires of the operand, or that the consumer requires of the result.
        source: the line of the operand's producer, or of the consumer.
    """

    name: str
    has: str | None
    wants: str
    source: Source | None

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        if self.has is None:
            return f"consumer {self.name} requires {self.wants}{where}"
        return f"operand {self.name} is {self.has}, taken as {self.wants}{where}"


@attrs.frozen(eq=False)
class AxisExplanation:
    """One mesh axis of an explanation.

    Args:
        axis, ranks: the axis and its size.
        placement: the value's placement on the axis, over logical dims.
        shards: what it shards, in words, where dims were split into atoms; else "".
        neighbours: the operands of the value's producer, and the value's consumers.
        alternatives: all strategies of its producer, first the chosen one, then the cheapest; empty for an input.
        typed: for each spec above that has the notation of atoms, code for the program that asks for it.
    """

    axis: str
    ranks: int
    placement: Placement
    shards: str
    neighbours: tuple[Neighbour, ...]
    alternatives: tuple[Alternative, ...]
    typed: Mapping[str, str]

    @property
    def chosen(self) -> Alternative | None:
        """The plan's strategy; None for an input."""
        return next((alternative for alternative in self.alternatives if alternative.chosen), None)

    def __str__(self) -> str:
        lines = [f"  along {self.axis} ({self.ranks} ranks): {self.shards or self.placement}"]
        lines += [f"    {neighbour}" for neighbour in self.neighbours]
        return "\n".join([*lines, *(f"    {alternative}" for alternative in self.alternatives)])


@attrs.frozen(eq=False)
class Explanation:
    """Why one value is sharded as it is; its `str` has all figures.

    Args:
        value: the value.
        spec: its spec.
        operation: the operation that computes it; None for an input or a constraint's result.
        pins: the specs that the user gave for it.
        axes: one explanation for each mesh axis of more than one rank.
        suspicious: the suspicious moves of the value, and of the operands of its operation.
    """

    value: Value
    spec: str
    operation: Operation | None
    pins: tuple[Pin, ...]
    axes: tuple[AxisExplanation, ...]
    suspicious: tuple[SuspiciousMove, ...]

    def __getitem__(self, axis: str) -> AxisExplanation:
        for found in self.axes:
            if found.axis == axis:
                return found
        raise PlanError(f"No mesh axis {axis!r} of more than one rank: {', '.join(f.axis for f in self.axes)}.")

    def __str__(self) -> str:
        given = "a constrained value" if any(pin.source for pin in self.pins) else "an input"
        made = given if self.operation is None else f"{self.operation!r}".partition(" = ")[2]
        source = None if self.operation is None else self.operation.source
        where = f" at {source}" + (f" (`{source.code}`)" if source.code else "") if source else ""
        lines = [f"{self.value!r} {self.spec}", f"  {made}{where}", *(f"  given: {pin}" for pin in self.pins)]
        moves = (f"  suspicious: {move}" for move in self.suspicious)
        return "\n".join([*lines, *map(str, self.axes), *self._legend(), *moves])

    def _legend(self) -> Iterator[str]:
        """What labels of atoms stand for, and how a program asks for specs that have their notation."""
        labels = {
            alternative.label: alternative.shards
            for axis in self.axes
            for alternative in axis.alternatives
            if alternative.shards
        }
        yield from (f"  {label}: {shards}" for label, shards in sorted(labels.items()))
        typed = {spec: code for axis in self.axes for spec, code in axis.typed.items()}
        yield from (f"  to ask for {spec}: {code}" for spec, code in typed.items())
