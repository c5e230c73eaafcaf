"""From the plan of a program in which layers stand for others to that of the whole program."""

from __future__ import annotations

import itertools

from spmd.core.placement import Partial, Placement
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.ir.source import Source
from spmd.plan.data.draft import Draft
from spmd.plan.search.draft_writer import DraftWriter
from spmd.plan.search.folding import Folded


def unfold(folded: Folded, planned: Draft) -> Draft:
    """The whole program with the decisions about the shorter one, of which all axes are planned.

    Every operation has the strategies of the one that stands for it, and takes its operands by the same reshards. Each
    stands where `insert_reshards` puts it.
    """
    return planned if folded.is_whole else _Unfolder(folded, planned).run()


class _Unfolder:
    def __init__(self, folded: Folded, planned: Draft) -> None:
        self.folded, self.planned, self.whole = folded, planned, folded.whole
        known = {value for operation in folded.draft.graph.operations for value in operation.tensors}
        self.resharding: dict[Value, Operation] = {}
        """By value that planning made, the reshard that makes it."""
        self.at_once: set[Value] = set()
        """Those of them that are made right behind what they are made from, because they reduce it."""
        kept, just_made = [], set[Value]()
        for operation in planned.graph.operations:
            if operation.op is REDISTRIBUTE and operation.tensors[0] not in known:
                (value,), (moved,) = operation.operands, operation.tensors
                self.resharding[moved] = operation
                just_made = {*just_made, moved} if value in just_made else set()
                if moved in just_made and self.reduces(value, moved):
                    self.at_once.update(self.path(moved))
            else:
                kept.append(operation)
                just_made = set(operation.tensors)
        self.model = dict(zip(folded.draft.graph.operations, kept, strict=True))
        states = {value: planned.states.get(folded.values.get(value, value), {}) for value in self.whole.logical}
        self.writer = DraftWriter(self.whole, states)
        self.held: dict[tuple[Value, tuple[tuple[str, Placement], ...]], Value] = {}

    def run(self) -> Draft:
        readers: dict[Value, dict[Value, Operation]] = {}
        for operation in self.whole.graph.operations:
            for value, wanted in zip(operation.operands, self.model_of(operation).operands, strict=True):
                readers.setdefault(value, {}).setdefault(wanted, operation)
        for operation in self.whole.graph.operations:
            self.place(operation)
            for value in operation.tensors:
                for wanted, reader in readers.get(value, {}).items():
                    self.reshard_at_once(value, wanted, reader)
        return self.writer.draft(self.planned.planned, self.planned.gap)

    def model_of(self, operation: Operation) -> Operation:
        """The planned operation that stands for one of the whole program."""
        return self.model[self.folded.operations[operation]]

    def place(self, operation: Operation) -> None:
        """Emit an operation, preceded by the reshards that its operands need."""
        model = self.model_of(operation)
        wanted = iter(model.operands)
        placed = operation.with_operands(lambda value: self.obtain(value, next(wanted), operation))
        self.writer.place(operation, placed, self.planned.strategies.get(model))

    def obtain(self, value: Value, wanted: Value, user: Operation) -> Value:
        """The value resharded as `wanted` is in the shorter program; once for all that want the same placements."""
        if wanted not in self.resharding:
            return value
        key = value, tuple(self.planned.states[wanted].items())
        if key not in self.held:
            (before,) = self.resharding[wanted].operands
            self.held[key] = self.reshard(value, self.obtain(value, before, user), wanted, user)
        return self.held[key]

    def reshard(self, value: Value, held: Value, wanted: Value, user: Operation) -> Value:
        """Emit the reshard of a value, or of what it was resharded to, after the model of `wanted`."""
        base = wanted
        while base in self.resharding:
            (base,) = self.resharding[base].operands
        source = self.source(value, base, wanted, user)
        return self.writer.reshard(value, held, wanted.name[len(base.name) :], self.planned.states[wanted], source)

    def source(self, value: Value, base: Value, wanted: Value, user: Operation) -> Source | None:
        """The line of a reshard: that of the model, where it is the same value, else as there of its maker or user."""
        line, maker = self.resharding[wanted].source, self.planned.graph.producers.get(base)
        if value is base:
            return line
        return self.whole.graph.producers[value].source if maker and maker.source == line else user.source

    def reshard_at_once(self, value: Value, wanted: Value, user: Operation) -> None:
        """Emit the reshards of a value up to `wanted` as far as they stand right behind what makes it."""
        for target in itertools.takewhile(self.at_once.__contains__, self.path(wanted)):
            self.obtain(value, target, user)

    def reduces(self, value: Value, moved: Value) -> bool:
        """Whether a reshard of the shorter program reduces a partial value."""
        before, after = self.planned.states[value], self.planned.states[moved]
        return any(isinstance(state, Partial) and after.get(axis) != state for axis, state in before.items())

    def path(self, moved: Value) -> list[Value]:
        """What planning made of a value of the shorter program, up to one of them."""
        path: list[Value] = []
        while moved in self.resharding:
            path.append(moved)
            (moved,) = self.resharding[moved].operands
        return path[::-1]
