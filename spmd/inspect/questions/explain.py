"""Explains the sharding of a value: its producer's alternatives, specs required by its neighbours, given specs.

Costs are those of the search: an alternative costs its local time and the collectives that it needs on both sides, with
all other choices, also on other mesh axes, as planned.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping

import attrs

from spmd.core.argument_paths import find_inputs
from spmd.core.placement import Placement
from spmd.core.spec import DTensorSpec
from spmd.errors import PlanError
from spmd.inspect.questions.replay import Figures, Replay, replay, states_of
from spmd.inspect.saving.document import defined_values, unique_names
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import DRAFT_MARKERS, FREE, REDISTRIBUTE
from spmd.ir.source import Source
from spmd.plan.data.draft import Draft, logical_meta, spec_of
from spmd.plan.data.layout import Layout
from spmd.plan.data.plan import PlanData
from spmd.plan.search.prepare import prepare
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
        moves: the collectives that it needs on both sides.
        extra_seconds: how much longer a step takes than with the strategy that was chosen; 0 for that one, infinite
            for one that `keep_sharded` rules out.
        chosen: whether it is the plan's strategy.
        replanned: the increase of a step's cost if the axis is planned again with this strategy; None unless `exact`.
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

    @property
    def seconds(self) -> float:
        """Predicted seconds of local time and collectives."""
        return self.local_seconds + sum(move.seconds for move in self.moves)

    def __str__(self) -> str:
        takes = f"{', '.join(self.operands)} -> {', '.join(self.results)}"
        price = "chosen" if self.chosen else _price(self.extra_seconds)
        if self.replanned is not None and not self.chosen:
            seconds = _price(self.replanned.seconds)
            sent = f", {self.replanned.bytes:+,.0f} bytes" if math.isfinite(self.replanned.bytes) else ""
            price += f" ({seconds}{sent} when planned anew)"
        needs = f"  needs {', '.join(map(str, self.moves))}" if self.moves else ""
        return f"{price:>12}  {self.label}: {takes}{needs}"


def _price(seconds: float) -> str:
    return f"{1e6 * seconds:+.3g} us" if math.isfinite(seconds) else "impossible"


@attrs.frozen
class Neighbour:
    """An operand of an operation, or a consumer of its result.

    Args:
        name: the name of the operand, or of the operator that consumes the result; or the pin that is there.
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
            return f"{self.name} requires {self.wants}{where}"
        return f"operand {self.name} is {self.has}, taken as {self.wants}{where}"


@attrs.frozen(eq=False)
class AxisExplanation:
    """One mesh axis of an explanation.

    Args:
        axis, ranks: the axis and its size.
        placement: the value's placement on the axis, over logical dims.
        neighbours: the operands of the value's producer, and the value's consumers.
        alternatives: all strategies of its producer, first the chosen one, then the cheapest; empty for an input.
    """

    axis: str
    ranks: int
    placement: Placement
    neighbours: tuple[Neighbour, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def chosen(self) -> Alternative | None:
        """The plan's strategy; None for an input."""
        return next((alternative for alternative in self.alternatives if alternative.chosen), None)

    def __str__(self) -> str:
        lines = [f"  along {self.axis} ({self.ranks} ranks): {self.placement}"]
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
    """

    value: Value
    spec: str
    operation: Operation | None
    pins: tuple[Pin, ...]
    axes: tuple[AxisExplanation, ...]

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
        return "\n".join([*lines, *map(str, self.axes)])


def explain(plan: PlanData, what: str | Value | Operation, *, exact: bool = False) -> Explanation:
    """Explain why a value of a plan is sharded as it is.

    Args:
        plan: the plan.
        what: the name of a value in `print(plan)`, the path of an argument (`0.params['w']`), a value, or an operation,
            which stands for its first result. A redistributed value stands for the one that was computed.
        exact: also replan each axis with every alternative fixed, for exact differences in seconds and bytes.

    Raises:
        PlanError: the plan has no such value.
    """
    return Explainer.of(plan).explain(_resolve(plan, what), exact=exact)


@attrs.frozen(eq=False)
class Explainer:
    """Explains the values of one plan.

    Args:
        draft: the program before planning, with the given specs of inputs, results and constraints as operations.
        specs: the specs of its values in the plan.
        replays: the problem of each axis, in planning order.
    """

    draft: Draft
    specs: Mapping[Value, DTensorSpec]
    replays: tuple[Replay, ...]

    @classmethod
    def of(cls, plan: PlanData) -> Explainer:
        """The explainer of a plan."""
        prepared = prepare(plan.request)
        draft = prepared.draft(plan.order)
        replays = tuple(replay(plan, prepared, axis) for axis in plan.order)
        return cls(draft, {**draft.specs(), **plan.specs}, replays)

    def explain(self, value: Value, *, exact: bool = False) -> Explanation:
        """Explain why a value of the program is sharded as it is; `exact` as in `explain`."""
        operation = _producer(self.draft, value)
        return Explanation(
            value,
            str(Layout(self.specs[value], self.draft.logical[value])),
            None if operation is None or operation in self.draft.pinned else operation,
            tuple(_pins(self.draft, value)),
            tuple(_Axis(found, value).explanation(exact) for found in self.replays),
        )


def _find_value(plan: PlanData, name: str) -> Value:
    """Find the value of a name, or the input at a path; of values that share a name, the last, which consumers take.

    Raises:
        PlanError: no value has the name, and no input or several are at the path; the message lists
            similar names.
    """
    graphs = plan.request.graph, plan.graph
    known = {value.name: value for graph in graphs for value in defined_values(graph)}
    known |= {text: value for graph in graphs for value, text in unique_names(graph).items() if text != value.name}
    wanted = name.removeprefix("%")
    if wanted in known:
        return known[wanted]
    inputs, paths = plan.request.graph.inputs, plan.request.input_paths
    found = find_inputs(name, paths, [value.name for value in inputs])
    if len(found) == 1:
        return inputs[found[0]]
    if found:
        first = ", ".join(paths[number] for number in found[:5])
        raise PlanError(f"{name!r} names {len(found)} arguments: {first}{', ...' * (len(found) > 5)}. Ask for one.")
    close = difflib.get_close_matches(wanted, (*known, *paths), n=5, cutoff=0.5)
    hint = f" Close names: {', '.join(close)}." if close else ""
    raise PlanError(
        f"The plan has no value {name!r}.{hint} print(plan) shows all {len(known)} of them; the names of the program "
        "that a rank runs are others."
    )


def _resolve(plan: PlanData, what: str | Value | Operation) -> Value:
    """The computed value, or the input, that the user's argument stands for."""
    if isinstance(what, Operation):
        if not what.tensors:
            raise PlanError(f"{what!r} has no result to explain.")
        value = what.tensors[0]
    else:
        value = _find_value(plan, what) if isinstance(what, str) else what
    known = set(defined_values(plan.request.graph))
    producers = {result: operation for operation in plan.graph.operations for result in operation.tensors}
    while value not in known and value in producers and producers[value].op in (FREE, *DRAFT_MARKERS):
        value = producers[value].operands[0]
    if value in known:
        return value
    twin = next((other for other in known if other.name == value.name), None)
    if value in plan.specs and twin is not None:  # an argument before its dims were split into atoms
        return twin
    raise PlanError(f"{what!r} is not of this plan. Ask by name, or for a value of plan.graph.")


def _producer(draft: Draft, value: Value) -> Operation | None:
    return next((operation for operation in draft.graph.operations if value in operation.tensors), None)


def _users(draft: Draft, value: Value) -> list[Operation]:
    return [operation for operation in draft.graph.operations if value in operation.operands]


def _pins(draft: Draft, value: Value) -> Iterator[Pin]:
    """The specs given for a value: as an input, by its producer, and by its consumers."""
    producer = _producer(draft, value)
    if value in draft.graph.inputs:
        yield _input_pin(draft, value)
    if producer is not None and producer in draft.pinned:
        yield _pin(draft, producer)
    for user in _users(draft, value):
        if user in draft.pinned:
            yield _pin(draft, user)


def _pin(draft: Draft, operation: Operation) -> Pin:
    """The pin that a pinned operation stands for; only constraints have a source line, inputs and results have none."""
    if operation.source is not None:
        return Pin("constrained", _layout(draft, operation), operation.source)
    first = operation
    while (producer := _producer(draft, first.operands[0])) is not None and producer in draft.pinned:
        first = producer
    if first.operands[0] in draft.graph.inputs:
        return _input_pin(draft, first.operands[0])
    last = operation
    while last.tensors[0] not in draft.graph.outputs:
        last = next(user for user in _users(draft, last.tensors[0]) if user in draft.pinned)
    position = draft.graph.outputs.index(last.tensors[0])
    return Pin(f"out_specs of result {position}", _layout(draft, last), None)


def _input_pin(draft: Draft, value: Value) -> Pin:
    return Pin("in_specs", str(Layout(draft.given[value], draft.logical[value])), None)


def _layout(draft: Draft, operation: Operation) -> str:
    return str(Layout(draft.pinned[operation][1], draft.logical[operation.tensors[0]]))


@attrs.frozen(eq=False)
class _Axis:
    """Explains one value on one axis."""

    replay: Replay
    value: Value

    @property
    def draft(self) -> Draft:
        return self.replay.problem.draft

    def explanation(self, exact: bool) -> AxisExplanation:
        axis = self.replay.problem.axis
        operation = _producer(self.draft, self.value)
        alternatives = (
            () if operation is None or operation in self.draft.pinned else self.alternatives(operation, exact)
        )
        return AxisExplanation(
            axis,
            self.draft.mesh.axis_size(axis),
            self.replay.source(self.value, {}),
            (*self.givers(operation), *self.takers(self.value)),
            tuple(alternatives),
        )

    def alternatives(self, operation: Operation, exact: bool) -> list[Alternative]:
        chosen = self.replay.choice.strategies[operation]
        candidates = dict.fromkeys((chosen, *self.replay.candidates[operation]))
        base = self.price(operation, chosen, 0.0, True)
        found = [base]
        known = self.replay.figures if exact else None
        for strategy in candidates:
            if strategy != chosen:
                priced = self.price(operation, strategy, base.seconds, False)
                found.append(
                    priced
                    if known is None
                    else attrs.evolve(priced, replanned=self.replay.replan(operation, strategy) - known)
                )
        return sorted(found, key=lambda alternative: (not alternative.chosen, alternative.extra_seconds))

    def price(self, operation: Operation, strategy: Strategy, base: float, chosen: bool) -> Alternative:
        """An alternative and its cost, with all other choices as planned."""
        values = tuple(dict.fromkeys((*operation.operands, *operation.tensors)))
        moves = tuple(moved for value in values for moved in self.moved(value, {operation: strategy}))
        local = self.replay.local_seconds(operation, strategy)
        total = local + sum(move.seconds for move in moves)
        return Alternative(
            strategy.label,
            strategy,
            tuple(self.text(value, s) for value, s in zip(operation.operands, strategy.operands, strict=True)),
            tuple(self.text(value, s) for value, s in zip(operation.tensors, strategy.results, strict=True)),
            local,
            moves,
            0.0 if chosen else total - base,
            chosen,
        )

    def moved(self, value: Value, changed: Mapping[Operation, Strategy]) -> Iterator[Moved]:
        cost = self.replay.problem.move_cost(value)
        for source, target in self.replay.moves(value, changed)[0]:
            found = cost.collective(source, target)
            if found is not None:
                yield Moved(self.root(value).name, found[0].value, found[1], cost.seconds(source, target))

    def givers(self, operation: Operation | None) -> Iterator[Neighbour]:
        if operation is None or operation in self.draft.pinned:
            return
        wanted = dict(zip(operation.operands, self.replay.choice.strategies[operation].operands, strict=True))
        for value, state in wanted.items():
            origin = self.root(value)
            producer = _producer(self.draft, origin)
            has = self.text(value, self.replay.source(value, {}))
            if producer is not None and producer in self.draft.pinned:
                name = f"{origin.name} ({_pin(self.draft, producer).what})"
            else:
                name = f"{origin.name} (in_specs)" if origin in self.draft.graph.inputs else origin.name
            yield Neighbour(name, has, self.text(value, state), producer.source if producer else None)

    def takers(self, value: Value) -> Iterator[Neighbour]:
        for use in self.replay.problem.uses.get(value, ()):
            operation = use.operation
            if operation.op is REDISTRIBUTE and operation not in self.draft.pinned:
                yield from self.takers(operation.tensors[0])  # a redistribution along another axis
                continue
            name = self.consumer(operation)
            for state in use.wanted(self.replay.choice.strategies[operation]):
                yield Neighbour(name, None, self.text(value, state), operation.source)

    def consumer(self, operation: Operation) -> str:
        """The name of an operation that consumes a value."""
        if operation in self.draft.pinned:
            return _pin(self.draft, operation).what
        if operation.op is FREE:
            return f"result {self.draft.graph.outputs.index(operation.tensors[0])}"
        return operation.name

    def root(self, value: Value) -> Value:
        """The value before redistributions along other axes."""
        producer = _producer(self.draft, value)
        while producer is not None and producer.op is REDISTRIBUTE and producer not in self.draft.pinned:
            value = producer.operands[0]
            producer = _producer(self.draft, value)
        return value

    def text(self, value: Value, state: Placement) -> str:
        """The spec of a value with one placement on this axis."""
        states = states_of(self.draft, value, self.replay.problem.axis, state)
        atoms = self.draft.logical[value]
        return str(Layout(spec_of(self.draft.mesh, states, logical_meta(value.meta, atoms)), atoms))
