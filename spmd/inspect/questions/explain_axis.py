"""Explains the sharding of a value on one mesh axis.

Costs are those of the search: an alternative costs its local time and the collectives that it needs on both sides, with
all other choices, also on other mesh axes, as planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from spmd.core.placement import Placement, Replicate, Shard
from spmd.inspect.questions.atoms import atom_text, has_atoms, typed
from spmd.inspect.questions.explanation import Alternative, AxisExplanation, Moved, Neighbour
from spmd.inspect.questions.given_specs import pin_of, producer_of
from spmd.inspect.questions.replay import Replay, states_of
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import FREE, REDISTRIBUTE
from spmd.plan.data.draft import Draft, logical_meta, spec_of
from spmd.plan.data.layout import Layout
from spmd.plan.search.hubs import Move
from spmd.rules.strategy import Strategy


@attrs.frozen(eq=False)
class AxisExplainer:
    """Explains one value on one axis; `typed` collects code for the specs with the notation of atoms."""

    replay: Replay
    value: Value
    typed: dict[str, str] = attrs.field(factory=dict, init=False)

    @property
    def draft(self) -> Draft:
        return self.replay.problem.draft

    def explanation(self, exact: bool) -> AxisExplanation:
        axis = self.replay.problem.axis
        operation = producer_of(self.draft, self.value)
        alternatives = (
            () if operation is None or operation in self.draft.pinned else self.alternatives(operation, exact)
        )
        state, atoms = self.replay.source(self.value, {}), self.draft.logical[self.value]
        refined = any(len(group) > 1 for group in atoms)
        return AxisExplanation(
            axis,
            self.draft.mesh.axis_size(axis),
            state,
            f"shards {atom_text(atoms, state.dim)}" if refined and isinstance(state, Shard) else "",
            (*self.givers(operation), *self.takers(self.value)),
            tuple(alternatives),
            self.typed,
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
        return sorted(found, key=lambda alternative: alternative.order)

    def price(self, operation: Operation, strategy: Strategy, base: float, chosen: bool) -> Alternative:
        """An alternative and its cost, with all other choices as planned."""
        changed = {operation: strategy}
        moves: dict[Value, list[tuple[Move, Moved]]] = {
            value: list(self.moved(value, changed))
            for value in dict.fromkeys((*operation.operands, *operation.tensors))
        }
        required: dict[Value, set[Placement]] = {}
        for value, state in zip(operation.operands, strategy.operands, strict=True):
            required.setdefault(value, set()).add(state)
        own = [
            moved
            for value, found in moves.items()
            for move, moved in found
            if value not in required or move in _paths([move for move, _ in found], required[value])
        ]
        local = self.replay.local_seconds(operation, strategy)
        total = local + sum(moved.seconds for found in moves.values() for _, moved in found)
        return Alternative(
            strategy.label,
            strategy,
            tuple(self.text(value, s) for value, s in zip(operation.operands, strategy.operands, strict=True)),
            tuple(self.text(value, s) for value, s in zip(operation.tensors, strategy.results, strict=True)),
            local,
            tuple(own),
            0.0 if chosen else total - base,
            chosen,
            shards=self.shards(operation, strategy) if "." in strategy.label else "",
        )

    def shards(self, operation: Operation, strategy: Strategy) -> str:
        """What a strategy that is named by an atom shards, in words."""
        values = (*operation.operands, *operation.tensors)
        return ", ".join(
            dict.fromkeys(
                f"{atom_text(self.draft.logical[value], state.dim)} of {self.root(value).name}"
                for value, state in zip(values, (*strategy.operands, *strategy.results), strict=True)
                if isinstance(state, Shard)
            )
        )

    def moved(self, value: Value, changed: Mapping[Operation, Strategy]) -> Iterator[tuple[Move, Moved]]:
        cost = self.replay.problem.move_cost(value)
        for source, target in self.replay.moves(value, changed)[0]:
            found = cost.collective(source, target)
            if found is not None:
                moved = Moved(self.root(value).name, found[0].kind, found[1], cost.seconds(source, target))
                yield (source, target), moved

    def givers(self, operation: Operation | None) -> Iterator[Neighbour]:
        if operation is None or operation in self.draft.pinned:
            return
        wanted = dict(zip(operation.operands, self.replay.choice.strategies[operation].operands, strict=True))
        for value, state in wanted.items():
            origin = self.root(value)
            producer = producer_of(self.draft, origin)
            has = self.text(value, self.replay.source(value, {}))
            if producer is not None and producer in self.draft.pinned:
                name = f"{origin.name} ({pin_of(self.draft, producer).what})"
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
            return pin_of(self.draft, operation).what
        if operation.op is FREE:
            return f"result {self.draft.graph.outputs.index(operation.tensors[0])}"
        return operation.tensors[0].name if operation.tensors else operation.name

    def root(self, value: Value) -> Value:
        """The value before redistributions along other axes."""
        producer = producer_of(self.draft, value)
        while producer is not None and producer.op is REDISTRIBUTE and producer not in self.draft.pinned:
            value = producer.operands[0]
            producer = producer_of(self.draft, value)
        return value

    def text(self, value: Value, state: Placement) -> str:
        """The spec of a value with one placement on this axis."""
        states = states_of(self.draft, value, self.replay.problem.axis, state)
        atoms = self.draft.logical[value]
        layout = Layout(spec_of(self.draft.mesh, states, logical_meta(value.meta, atoms)), atoms)
        if has_atoms(layout):
            known = self.typed.get(str(layout)) if self.root(value) is not self.root(self.value) else None
            self.typed[str(layout)] = known or typed(self.root(value).name, layout)
        return str(layout)


def _paths(moves: list[Move], wanted: set[Placement]) -> set[Move]:
    """The moves that lead to placements, or to the replica that they are slices of."""
    reached = {state for state in wanted if any(target == state for _, target in moves)}
    if len(reached) < len(wanted):
        reached.add(Replicate())
    found: set[Move] = set()
    for _ in moves:  # a move may start where another one leads
        found |= {move for move in moves if move[1] in reached}
        reached |= {source for source, _ in found}
    return found
