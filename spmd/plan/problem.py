"""One mesh axis as a minimisation problem: variables with small domains and tables of seconds.

There is one variable for every operation (its strategy) and one *hub* for every value with several uses: the placement
in which the value is produced and the set of placements acquired for it, each paid once however many uses want it. A
value with one use needs no hub: moving it is a table between its producer and its consumer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations

import attrs
import torch

from spmd.graph import Operation, Value
from spmd.placement import Partial, Placement, Replicate, Shard
from spmd.plan.candidates import all_candidates
from spmd.plan.cost import LocalCost, MoveCost
from spmd.plan.draft import Draft
from spmd.plan.elimination import Table, minimize
from spmd.plan.machine import Machine
from spmd.rules.strategy import Strategy

Move = tuple[Placement, Placement]


@attrs.frozen
class Hub:
    """The placements in which a value is at hand for its uses."""

    held: frozenset[Placement]

    def offers(self, wanted: Placement) -> bool:
        """Whether a use can have a placement without a further collective: from a replica, all others are local."""
        return wanted in self.held or Replicate() in self.held


@attrs.frozen(eq=False)
class AxisChoice:
    """The solution for one axis.

    Args:
        strategies: of every operation.
        produced: the placement in which every value that is used is produced.
        moves: the moves of every value that is used, in an order in which each can start; slices of a replica and
            the like, which cost nothing, are not among them.
        seconds: its cost.
    """

    strategies: Mapping[Operation, Strategy]
    produced: Mapping[Value, Placement]
    moves: Mapping[Value, tuple[Move, ...]]
    seconds: float


@lru_cache(maxsize=4096)
def hub_choices(sources: tuple[Placement, ...], wanted: tuple[Placement, ...], acquire: int) -> tuple[Hub, ...]:
    """The hubs worth considering: a replica, of which every shard is a slice, or up to `acquire` shards.

    A pending reduction may be at hand besides, if the value can be produced so; it is never acquired.
    """
    shards = tuple(state for state in wanted if isinstance(state, Shard))
    sets: list[tuple[Placement, ...]] = [(Replicate(),), *((shard,) for shard in shards)]
    pending = [state for state in wanted if isinstance(state, Partial) and state in sources]
    with_pending = [(partial, *held) for partial in pending for held in ((), *sets)]
    pairs = combinations(shards, 2) if acquire > 1 else ()
    return tuple(Hub(frozenset(held)) for held in (*sets, *pairs, *with_pending))


def plan_moves(
    source: Placement, hub: Hub, seconds: Callable[[Placement, Placement], float]
) -> tuple[tuple[Move, ...], float]:
    """The cheapest moves from the placement in which a value is produced to those of a hub, and their time.

    Infinite if the hub holds a pending reduction that the value is not produced with.
    """
    targets = sorted((state for state in hub.held if state != source), key=repr)
    if source == Replicate() or not targets:
        return (), 0.0
    if any(isinstance(state, Partial) for state in targets):
        return (), math.inf
    if len(targets) == 1:
        return ((source, targets[0]),), seconds(source, targets[0])
    first, second = targets
    chains: list[tuple[Move, Move]] = [
        ((source, first), (source, second)),
        ((source, first), (first, second)),
        ((source, second), (second, first)),
    ]
    costs = [sum(seconds(*move) for move in chain) for chain in chains]
    best = costs.index(min(costs))
    return chains[best], costs[best]


@attrs.frozen(eq=False)
class _Use:
    """One operation that takes a value, at one or several operand positions."""

    operation: Operation
    positions: tuple[int, ...]

    def wanted(self, strategy: Strategy) -> tuple[Placement, ...]:
        return tuple(dict.fromkeys(strategy.operands[position] for position in self.positions))


class AxisProblem:
    """The tables of one axis of a draft.

    Args:
        draft: the program and the axes planned so far.
        axis: the axis to plan.
        machine: its costs.
        preview: guessed placements on another axis of `preview_ranks` ranks, planned later.
        acquire: how many shards may be acquired for one value.
    """

    def __init__(
        self,
        draft: Draft,
        axis: str,
        machine: Machine,
        preview: Mapping[Value, Placement] | None = None,
        preview_ranks: int = 1,
        acquire: int = 2,
    ) -> None:
        self.draft = draft
        self.axis = axis
        self.count = draft.mesh.axis_size(axis)
        self.acquire = acquire
        self.cost = LocalCost.of(machine, draft, preview, preview_ranks)
        self.move = MoveCost(machine, axis, self.count)
        self.strategies = all_candidates(draft, axis)
        self.variables = {operation: index for index, operation in enumerate(draft.graph.operations)}
        self.domains = [len(self.strategies[operation]) for operation in draft.graph.operations]
        self.hubs: dict[Value, tuple[int, tuple[Hub, ...]]] = {}
        self.uses = _uses(draft)
        self.producers = {
            value: (operation, position)
            for operation in draft.graph.operations
            for position, value in enumerate(operation.tensors)
        }

    def solve(self) -> AxisChoice:
        """The cheapest strategies and hubs; PlanError if there are none, TooWideError if the search is too large."""
        tables = list(self._tables())
        solution = minimize(self.domains, tables)
        strategies = {
            operation: self.strategies[operation][solution.choices[variable]]
            for operation, variable in self.variables.items()
        }
        produced = {value: self._source(value, strategies) for value in self.uses}
        moves = {value: self._moves(value, produced[value], strategies, solution.choices) for value in self.uses}
        return AxisChoice(strategies, produced, moves, solution.cost)

    def _moves(
        self, value: Value, source: Placement, strategies: Mapping[Operation, Strategy], choices: Sequence[int]
    ) -> tuple[Move, ...]:
        if value in self.hubs:
            variable, hubs = self.hubs[value]
            return self._reach(value, source, hubs[choices[variable]])[0]
        (use,) = self.uses[value]
        (wanted,) = use.wanted(strategies[use.operation])
        return () if Hub(frozenset([source])).offers(wanted) else ((source, wanted),)

    def _reach(self, value: Value, source: Placement, hub: Hub) -> tuple[tuple[Move, ...], float]:
        return plan_moves(source, hub, lambda start, stop: self._move_seconds(value, start, stop))

    def _source(self, value: Value, strategies: Mapping[Operation, Strategy]) -> Placement:
        if value in self.producers:
            operation, position = self.producers[value]
            return strategies[operation].results[position]
        return self.draft.placed[value].placement(self.axis)

    def _tables(self) -> Iterator[Table]:
        for operation, variable in self.variables.items():
            seconds = [self.cost.seconds(operation, s, self.axis) for s in self.strategies[operation]]
            yield Table((variable,), torch.tensor(seconds, dtype=torch.float64))
        for value, uses in self.uses.items():
            single = len(uses) == 1 and len(uses[0].positions) == 1
            yield from self._edge_tables(value, uses[0]) if single else self._hub_tables(value, uses)

    def _sources(self, value: Value) -> tuple[Placement, ...]:
        """The placement of a value under every strategy of its producer."""
        if value not in self.producers:
            return (self.draft.placed[value].placement(self.axis),)
        operation, position = self.producers[value]
        return tuple(strategy.results[position] for strategy in self.strategies[operation])

    def _move_seconds(self, value: Value, source: Placement, target: Placement) -> float:
        return self.move.seconds(source, target, self.cost.sizes[value], value.meta.dtype.itemsize)

    def _edge_tables(self, value: Value, use: _Use) -> Iterator[Table]:
        sources = self._sources(value)
        (position,) = use.positions
        wanted = [strategy.operands[position] for strategy in self.strategies[use.operation]]
        known: dict[Move, float] = {}
        for source in dict.fromkeys(sources):
            for target in dict.fromkeys(wanted):
                known[source, target] = self._move_seconds(value, source, target)
        costs = [[known[source, target] for target in wanted] for source in sources]
        yield self._table(value, self.variables[use.operation], costs)

    def _hub_tables(self, value: Value, uses: Sequence[_Use]) -> Iterator[Table]:
        sources = self._sources(value)
        wanted = dict.fromkeys(
            state for use in uses for strategy in self.strategies[use.operation] for state in use.wanted(strategy)
        )
        hubs = hub_choices(tuple(dict.fromkeys(sources)), tuple(wanted), self.acquire)
        hub = len(self.domains)
        self.domains.append(len(hubs))
        self.hubs[value] = (hub, hubs)
        reach = {source: [self._reach(value, source, choice)[1] for choice in hubs] for source in dict.fromkeys(sources)}
        yield self._table(value, hub, [reach[source] for source in sources])
        for use in uses:
            options = [use.wanted(strategy) for strategy in self.strategies[use.operation]]
            offered = {
                option: [all(choice.offers(state) for state in option) for choice in hubs]
                for option in dict.fromkeys(options)
            }
            yield Table((self.variables[use.operation], hub), torch.tensor(_mask([offered[o] for o in options]), dtype=torch.float64))

    def _table(self, value: Value, variable: int, costs: list[list[float]]) -> Table:
        """A table between the producer of a value (rows) and another variable (columns)."""
        table = torch.tensor(costs, dtype=torch.float64)
        if value not in self.producers:
            return Table((variable,), table[0])
        producer = self.variables[self.producers[value][0]]
        return Table((producer, variable), table)


def _mask(allowed: list[list[bool]]) -> list[list[float]]:
    return [[0.0 if entry else float("inf") for entry in row] for row in allowed]


def _uses(draft: Draft) -> dict[Value, list[_Use]]:
    uses: dict[Value, list[_Use]] = {}
    for operation in draft.graph.operations:
        positions: dict[Value, list[int]] = {}
        for position, value in enumerate(operation.operands):
            positions.setdefault(value, []).append(position)
        for value, found in positions.items():
            uses.setdefault(value, []).append(_Use(operation, tuple(found)))
    return uses
