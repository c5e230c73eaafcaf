"""Insert reshards: every change of placement that the solution of one axis needs becomes an explicit operation."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from spmd.collectives.manual import ENTER, LEAVE
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import BEGINS, END, LEAVES, Regions
from spmd.plan.data.draft import Draft, Equals
from spmd.plan.search.problem import AxisChoice
from spmd.rules.strategy import Strategy


def insert_reshards(draft: Draft, axis: str, choice: AxisChoice) -> Draft:
    """The draft with one more axis planned.

    Each move of a value is inserted once, just before the first operation that needs it; the reduction of a partial
    result just after the operation that produces it. Each slice of a replica is inserted once per placement.

    Args:
        draft: the program and the axes planned so far.
        axis: the axis that `choice` is for.
        choice: the strategies of all operations and the moves of all values.
    """
    return _ReshardInserter(draft, axis, choice).run()


class RegionBlocks:
    """The operations of a program so far, those of each open loop and branch by themselves.

    Args:
        regions: of the program whose operations are placed.
    """

    def __init__(self, regions: Regions[Operation, Value]) -> None:
        self._regions = regions
        self._open: list[tuple[Operation | None, list[Operation]]] = [(None, [])]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All of them, when nothing is open."""
        return tuple(self._open[0][1])

    def place(self, operation: Operation, placed: Operation) -> None:
        """Add what stands in place of an operation of the program."""
        if operation.op in BEGINS:
            self._open.append((operation, []))
        elif operation.op is END:
            _, inside = self._open.pop()
            self._open[-1][1].extend(inside)
        self._open[-1][1].append(placed)

    def reshard(self, value: Value, operation: Operation) -> None:
        """Add a reshard of a value of the program: in the loop or branch in which that is made, before those inside.

        So a loop around its consumer reads it moved, and moves nothing itself.
        """
        home = self._regions.begin(value)
        next(inside for begin, inside in self._open if begin is home).append(operation)


class _ReshardInserter:
    def __init__(self, draft: Draft, axis: str, choice: AxisChoice) -> None:
        self.draft = draft
        self.axis = axis
        self.choice = choice
        self.blocks = RegionBlocks(draft.graph.regions)
        self.held: dict[Value, dict[Placement, Value]] = {}
        self.logical = dict(draft.logical)
        self.states = {value: dict(states) for value, states in draft.states.items()}
        self.options = dict(draft.options)
        self.pinned = dict(draft.pinned)
        self.fused = set(draft.fused)
        self.latency_shares = dict(draft.latency_shares)
        self.strategies: dict[Operation, Mapping[str, Strategy]] = {}
        self.times, self.first = dict(draft.equals.times), dict(draft.equals.first)
        self.same: dict[tuple[Value, Placement, Placement], Value] = {}

    def run(self) -> Draft:
        for value in (*self.draft.graph.inputs, *(value for value, _ in self.draft.graph.constants)):
            self._define(value, self.draft.given[value].placement(self.axis))
        for operation in self.draft.graph.operations:
            self._place(operation)
        graph = attrs.evolve(self.draft.graph, operations=self.blocks.operations)
        return attrs.evolve(
            self.draft,
            graph=graph,
            logical=self.logical,
            options=self.options,
            pinned=self.pinned,
            fused=frozenset(self.fused),
            latency_shares=self.latency_shares,
            states=self.states,
            strategies=self.strategies,
            planned=(*self.draft.planned, self.axis),
            equals=Equals(self.times, self.first),
            gap=max(self.draft.gap, self.choice.gap),
        )

    def _define(self, value: Value, state: Placement) -> None:
        self.held[value] = {state: value}
        self._set_state(value, state)

    def _set_state(self, value: Value, state: Placement) -> None:
        states = self.states.setdefault(value, {})
        if state != Replicate():
            states[self.axis] = state

    def _place(self, operation: Operation) -> None:
        """Emit an operation, preceded by the moves that its operands need."""
        strategy = self.choice.strategies[operation]
        wanted = iter(strategy.operands)
        placed = operation.with_operands(lambda value: self._obtain(value, next(wanted), operation))
        self.blocks.place(operation, placed)
        self._carry(operation, placed, strategy)
        for value, state in zip(placed.tensors, strategy.results, strict=True):
            self._define(value, state)
            if isinstance(state, Partial) and operation.op not in LEAVES:
                self._reduce(value, placed)

    def _carry(self, old: Operation, new: Operation, strategy: Strategy) -> None:
        """Transfer the decisions about an operation to the one that replaces it."""
        if old in self.pinned:
            self.pinned[new] = self.pinned.pop(old)
        if old.op in (ENTER, LEAVE) or (new not in self.pinned and old.op is not REDISTRIBUTE):
            self.strategies[new] = {**self.draft.strategies.get(old, {}), self.axis: strategy}
        if old in self.options:
            self.options[new] = self.options.pop(old)

    def _reduce(self, value: Value, operation: Operation) -> None:
        """Emit the moves of a value that start from a partial placement, right after its producer."""
        for source, target in self.choice.moves.get(value, ()):
            if isinstance(source, Partial):
                self._move(value, source, target, operation)

    def _obtain(self, value: Value, wanted: Placement, user: Operation) -> Value:
        """The value in the placement that an operation requires, resharded if it is not acquired yet."""
        held = self.held[value]
        if wanted in held:
            return held[wanted]
        moves = self.choice.moves[value]
        for source, target in moves:
            if target not in held and (target == wanted or not _is_target(moves, wanted)):
                self._move(value, source, target, user)
        if wanted not in held:
            self._move(value, Replicate(), wanted, user)
        return held[wanted]

    def _move(self, value: Value, source: Placement, target: Placement, user: Operation) -> None:
        held = self.held[value]
        if target in held:
            return
        if source not in held:
            start = next(s for s, t in self.choice.moves[value] if t == source)
            self._move(value, start, source, user)
        moved = Value(f"{value.name}_{_suffix(source, target)}", value.meta)
        operation = Operation(REDISTRIBUTE, (held[source],), {}, (moved,), user.source)
        self.blocks.reshard(value, operation)
        self.logical[moved] = self.logical[value]
        if value in self.fused:
            self.fused.add(moved)
        if value in self.latency_shares:
            self.latency_shares[moved] = self.latency_shares[value]
        if value in self.times:
            self.times[moved] = self.times[value]
        if value in self.first:
            self.first[moved] = self.same.setdefault((self.first[value], source, target), moved)
        self.states[moved] = {axis: s for axis, s in self.states[value].items() if axis != self.axis}
        self._set_state(moved, target)
        held[target] = moved


def _is_target(moves: tuple[tuple[Placement, Placement], ...], wanted: Placement) -> bool:
    return any(target == wanted for _, target in moves)


def _suffix(source: Placement, target: Placement) -> str:
    if isinstance(target, Partial):
        return "partial"
    if isinstance(source, Partial):
        return "reduced" if target == Replicate() else "scattered"
    if isinstance(target, Shard):
        return "shard" if source == Replicate() else "exchanged"
    return "gathered"
