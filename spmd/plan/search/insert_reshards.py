"""Insert reshards: every change of placement that the solution of one axis needs becomes an explicit operation."""

from __future__ import annotations

import attrs

from spmd.collectives.manual import ENTER, LEAVE
from spmd.core.placement import Partial, Placement, Replicate, Shard
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.regions import LEAVES
from spmd.plan.data.draft import Draft
from spmd.plan.search.draft_writer import DraftWriter
from spmd.plan.search.problem import AxisChoice


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


class _ReshardInserter:
    def __init__(self, draft: Draft, axis: str, choice: AxisChoice) -> None:
        self.draft = draft
        self.axis = axis
        self.choice = choice
        self.writer = DraftWriter(draft, draft.states)
        self.held: dict[Value, dict[Placement, Value]] = {}
        self.made, self.moved_often = dict(draft.counts.made), dict(draft.counts.moved)

    def run(self) -> Draft:
        for value in (*self.draft.graph.inputs, *(value for value, _ in self.draft.graph.constants)):
            self._define(value, self.draft.given[value].placement(self.axis))
        for operation in self.draft.graph.operations:
            self._place(operation)
        written = self.writer.draft((*self.draft.planned, self.axis), max(self.draft.gap, self.choice.gap))
        counts = attrs.evolve(self.draft.counts, made=self.made, moved=self.moved_often)
        return attrs.evolve(written, counts=counts)

    def _define(self, value: Value, state: Placement) -> None:
        self.held[value] = {state: value}
        states = self.writer.states.setdefault(value, {})
        if state != Replicate():
            states[self.axis] = state

    def _place(self, operation: Operation) -> None:
        """Emit an operation, preceded by the moves that its operands need."""
        strategy = self.choice.strategies[operation]
        wanted = iter(strategy.operands)
        placed = operation.with_operands(lambda value: self._obtain(value, next(wanted), operation))
        decided = operation.op in (ENTER, LEAVE) or (
            operation not in self.draft.pinned and operation.op is not REDISTRIBUTE
        )
        chosen = {**self.draft.strategies.get(operation, {}), self.axis: strategy}
        self.writer.place(operation, placed, chosen if decided else None)
        for value, state in zip(placed.tensors, strategy.results, strict=True):
            self._define(value, state)
            if isinstance(state, Partial) and operation.op not in LEAVES:
                self._reduce(value, placed)

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
        states = {axis: state for axis, state in self.writer.states[value].items() if axis != self.axis}
        if target != Replicate():
            states[self.axis] = target
        moved = self.writer.reshard(value, held[source], f"_{_suffix(source, target)}", states, user.source)
        if value in self.moved_often:
            self.made[moved] = self.moved_often[moved] = self.moved_often[value]
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
