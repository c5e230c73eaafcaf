"""Where the spec of every value is decided: one mesh axis as a minimisation problem.

The problem has variables with small domains, and cost tables in seconds; `spmd.plan.solver` finds the assignment of
least cost. The spec of a value is the placement on each axis that the strategy of its producer has for it.
There is one variable for every operation, its strategy, and one for every value with several consumers, its *hub*: the
set of placements in which the value is acquired, each paid once for all consumers (`spmd.plan.search.hubs`). A value
with one consumer needs no hub: its reshard is a table between producer and consumer.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy

import attrs
import torch

from spmd.core.placement import Placement, Replicate
from spmd.ir.graph import Operation, Value
from spmd.ir.regions import ITEM, TIED
from spmd.plan.cost.local_cost import LocalCost, MoveCost
from spmd.plan.data.assignment import States, shrink
from spmd.plan.data.draft import Draft
from spmd.plan.machine.machine import Machine
from spmd.plan.search.candidates import all_candidates
from spmd.plan.search.hubs import Hub, Move, edge_table, hub_choices, hub_table, offer_table, plan_moves
from spmd.plan.search.options import SEARCH, SearchOptions
from spmd.plan.solver.elimination import TooWideError, lower_bound
from spmd.plan.solver.neighbourhoods import evaluate, improve
from spmd.plan.solver.table import Table
from spmd.rules.strategy import Strategy

TIE = 1e-15
"""Seconds added to each choice relative to the one before it: negligible against any cost, but it breaks ties so that
identical layers get identical choices."""


@attrs.frozen(eq=False)
class AxisChoice:
    """The solution for one axis.

    Args:
        strategies: the strategy of every operation.
        moves: the moves of every value that has consumers, in an order in which each move's source exists; moves from
            a replica, which cost nothing, are left out.
        gap: an upper bound on the relative distance of its cost from the optimum (0.01 is 1%); 0 if it is optimal.
    """

    strategies: Mapping[Operation, Strategy]
    moves: Mapping[Value, tuple[Move, ...]]
    gap: float

    def equals(self, other: AxisChoice) -> bool:
        """Whether both choose the same strategies and moves for the same program."""
        return self.strategies == other.strategies and self.moves == other.moves


@attrs.frozen(eq=False)
class Use:
    """One operation that consumes a value, at one or several operand positions."""

    operation: Operation
    positions: tuple[int, ...]

    def wanted(self, strategy: Strategy) -> tuple[Placement, ...]:
        """The placements of the value that a strategy requires."""
        return tuple(dict.fromkeys(strategy.operands[position] for position in self.positions))


class AxisProblem:
    """The minimisation problem of one mesh axis of a draft.

    Args:
        draft: the program and the axes planned so far.
        axis: the mesh axis to plan.
        machine: the cost constants.
        preview: guessed placements of values on axes that are planned later.
        acquire: the most shards that a hub may hold, 1 or 2.
        only: operations whose strategy is fixed, with these strategies.
        memory_prices: memory prices (Lagrange multipliers) of values, in seconds per byte; they are added to the times
            for the placements in which a value is held. Inputs have none, but for those that loops read by items.
    """

    def __init__(
        self,
        draft: Draft,
        axis: str,
        machine: Machine,
        preview: Mapping[Value, States] | None = None,
        acquire: int = 2,
        only: Mapping[Operation, Strategy] | None = None,
        memory_prices: Mapping[Value, float] | None = None,
    ) -> None:
        self.draft = draft
        self.axis = axis
        self.preview = preview or {}
        self.acquire = acquire
        self.memory_prices = memory_prices or {}
        self.cost = LocalCost.of(machine, draft, self.preview)
        self.never_gathered = draft.never_gathered_values(axis)
        self._move_costs: dict[Hashable, MoveCost] = {}
        self._seconds: dict[Hashable, torch.Tensor] = {}
        self._known_times: dict[Hashable, torch.Tensor] = {}
        self._edges: dict[Hashable, torch.Tensor] = {}
        self._hubs: dict[Hashable, tuple[tuple[Hub, ...], torch.Tensor, tuple[torch.Tensor, ...]]] = {}
        self.machine = machine
        self.strategies = all_candidates(draft, axis)
        self.strategies.update({operation: (strategy,) for operation, strategy in (only or {}).items()})
        self.variables = {operation: index for index, operation in enumerate(draft.graph.operations)}
        self.domains = [len(self.strategies[operation]) for operation in draft.graph.operations]
        self.hubs: dict[Value, tuple[int, tuple[Hub, ...]]] = {}
        self.uses, self.ties = _uses(draft)
        regions, counts = draft.graph.regions, draft.counts
        self.runs = {o: regions.runs(o) * counts.runs(o) for o in draft.graph.operations}
        self.producers = {
            value: (operation, position)
            for operation in draft.graph.operations
            for position, value in enumerate(operation.tensors)
        }

    def solve(self, search: SearchOptions = SEARCH) -> AxisChoice:
        """The cheapest strategies and moves, or good ones where the exact search would be too large.

        In that case large-neighbourhood search improves the choices of `_start`.

        Raises:
            NoAssignmentError: no choice of strategies satisfies the given specs and constraints.
        """
        tables = list(self._tables())
        gap = 0.0
        try:
            solution = search.minimize(self.domains, tables)
        except TooWideError:
            solution = improve(self.domains, tables, self._start(tables, search), self._program_order())
            bound = lower_bound(self.domains, tables, search.bound_cells)
            gap = max(solution.cost / bound - 1, 0.0) if bound > 0 else math.inf
        strategies = {
            operation: self.strategies[operation][solution.choices[variable]]
            for operation, variable in self.variables.items()
        }
        moves = {value: self._moves(value, strategies, solution.choices) for value in self.uses}
        return AxisChoice(strategies, moves, gap)

    def _start(self, tables: Sequence[Table], search: SearchOptions) -> list[int]:
        """The choices to start from: the first of every domain, with which values are replicated.

        Where those are not allowed, the best with at most one shard in every hub, if these can be found.
        """
        first = [0] * len(self.domains)
        if self.acquire == 1 or math.isfinite(evaluate(tables, first)):
            return first
        small = copy(self)
        small.acquire, small.domains, small.hubs, small._hubs = 1, self.domains[: len(self.variables)], {}, {}
        try:
            choices = search.minimize(small.domains, list(small._tables())).choices
        except TooWideError:
            return first
        start = [*choices[: len(self.variables)], *[0] * len(self.hubs)]
        for value, (hub, hubs) in self.hubs.items():
            chosen, options = small.hubs[value]
            start[hub] = hubs.index(options[choices[chosen]])
        return start

    def _program_order(self) -> list[int]:
        """All variables in program order, each hub just after the producer of its value."""
        places = {variable: float(variable) for variable in self.variables.values()}
        for value, (hub, _) in self.hubs.items():
            places[hub] = self.variables[self.producers[value][0]] + 0.5 if value in self.producers else -1.0
        return sorted(places, key=lambda variable: (places[variable], variable))

    def _moves(
        self, value: Value, strategies: Mapping[Operation, Strategy], choices: Sequence[int]
    ) -> tuple[Move, ...]:
        source = self.source(value, strategies)
        if value in self.hubs:
            variable, hubs = self.hubs[value]
            return plan_moves(source, hubs[choices[variable]], self.move_cost(value))[0]
        (use,) = self.uses[value]
        (wanted,) = use.wanted(strategies[use.operation])
        return () if source in (wanted, Replicate()) else ((source, wanted),)

    def move_cost(self, value: Value) -> MoveCost:
        """The times of resharding a value along the axis."""
        dtypes, share = (value.meta.dtype, self.draft.reduce_dtype), self.draft.latency_shares.get(value, 1.0)
        gathering = value in self.never_gathered and self.draft.gather_seconds
        runs = self.draft.graph.regions.runs_of(value) * self.draft.counts.moved.get(value, 1)
        key = (self.cost.sizes[value], *dtypes, gathering, share, runs)
        if key not in self._move_costs:
            self._move_costs[key] = MoveCost(self.machine, self.axis, self.draft.mesh.axis_size(self.axis), *key)
        return self._move_costs[key]

    def source(self, value: Value, strategies: Mapping[Operation, Strategy]) -> Placement:
        """The placement in which a value is produced."""
        if value in self.producers:
            operation, position = self.producers[value]
            return strategies[operation].results[position]
        return self.draft.given[value].placement(self.axis)

    def _tables(self) -> Iterator[Table]:
        """All tables; identical operations share table objects, by which the solver recognises identical layers."""
        for operation, variable in self.variables.items():
            yield Table((variable,), self._times(operation))
        for operation, position in self.ties:
            yield self._tie(operation, position)
        yield from map(self._tie_of_layers, self.draft.counts.ties)
        for value, uses in self.uses.items():
            single = len(uses) == 1 and len(uses[0].positions) == 1
            yield from self._edge_tables(value, uses[0]) if single else self._hub_tables(value, uses)

    def _times(self, operation: Operation) -> torch.Tensor:
        """Seconds of an operation with each of its strategies."""
        strategies, runs = self.strategies[operation], self.runs[operation]
        key = (id(strategies), self.cost.cache_key(operation))
        if key not in self._seconds:
            seconds = [self.cost.seconds(operation, strategy, self.axis) for strategy in strategies]
            self._seconds[key] = torch.tensor(seconds, dtype=torch.float64)
        if (key, runs) not in self._known_times:
            self._known_times[key, runs] = runs * self._seconds[key] + _preference(len(strategies))
        return self._known_times[key, runs]

    def _tie(self, operation: Operation, position: int) -> Table:
        """Infinity where an operation would take an operand in another placement than that in which it is made."""
        value = operation.operands[position]
        wanted = [strategy.operands[position] for strategy in self.strategies[operation]]
        costs = [[0.0 if made == taken else math.inf for taken in wanted] for made in self._sources(value)]
        return self._table(value, self.variables[operation], torch.tensor(costs, dtype=torch.float64))

    def _tie_of_layers(self, tied: tuple[Value, Value]) -> Table:
        """Infinity where what a layer takes from the one before would have another placement than what it gives."""
        one, other = sorted(tied, key=lambda value: self.variables[self.producers[value][0]])
        costs = [[0.0 if a == b else math.inf for b in self._sources(other)] for a in self._sources(one)]
        return self._table(one, self.variables[self.producers[other][0]], torch.tensor(costs, dtype=torch.float64))

    def _memory_price(self, value: Value, state: Placement) -> float:
        """The price in seconds of holding a value in a placement."""
        sizes = shrink(self.cost.sizes[value], state, self.draft.mesh.axis_size(self.axis))
        return self.memory_prices[value] * math.prod(sizes) * value.meta.dtype.itemsize

    def _price_of_use(self, value: Value, source: Placement, state: Placement, use: Use) -> float:
        """The price of holding a value for one consumer; a loop that reads its items holds it resharded, too."""
        price = self._memory_price(value, source)
        is_held = use.operation.op is ITEM and state != source
        return price + self._memory_price(value, state) if is_held else price

    def _sources(self, value: Value) -> tuple[Placement, ...]:
        """The placement of a value under every strategy of its producer."""
        if value not in self.producers:
            return (self.draft.given[value].placement(self.axis),)
        operation, position = self.producers[value]
        return tuple(strategy.results[position] for strategy in self.strategies[operation])

    def _cache_key(self, value: Value, uses: Sequence[Use]) -> Hashable:
        """A cache key for the tables of a value: values with equal keys have equal tables."""
        if value in self.producers:
            operation, position = self.producers[value]
            source: Hashable = (id(self.strategies[operation]), position)
        else:
            source = self.draft.given[value].placement(self.axis)
        taken = tuple((id(self.strategies[use.operation]), use.positions) for use in uses)
        return source, taken, id(self.move_cost(value)), value if value in self.memory_prices else None

    def _edge_tables(self, value: Value, use: Use) -> Iterator[Table]:
        key = self._cache_key(value, (use,))
        if key not in self._edges:
            sources = self._sources(value)
            wanted = tuple(state for strategy in self.strategies[use.operation] for state in use.wanted(strategy))
            costs = edge_table(sources, wanted, self.move_cost(value))
            if value in self.memory_prices:
                prices = [[self._price_of_use(value, source, state, use) for state in wanted] for source in sources]
                costs = costs + torch.tensor(prices, dtype=torch.float64)
            self._edges[key] = self._from_producer(value, costs)
        yield self._table(value, self.variables[use.operation], self._edges[key])

    def _hub_tables(self, value: Value, uses: Sequence[Use]) -> Iterator[Table]:
        key = self._cache_key(value, uses)
        if key not in self._hubs:
            self._hubs[key] = self._hub(value, uses)
        hubs, costs, offers = self._hubs[key]
        hub = len(self.domains)
        self.domains.append(len(hubs))
        self.hubs[value] = (hub, hubs)
        yield self._table(value, hub, costs)
        for use, offer in zip(uses, offers, strict=True):
            yield Table((self.variables[use.operation], hub), offer)

    def _hub(self, value: Value, uses: Sequence[Use]) -> tuple[tuple[Hub, ...], torch.Tensor, tuple[torch.Tensor, ...]]:
        """The hubs of a value, the cost of reaching each, and for every consumer which hubs serve its strategies."""
        sources = self._sources(value)
        options = [tuple(map(use.wanted, self.strategies[use.operation])) for use in uses]
        wanted = dict.fromkeys(state for option in options for states in option for state in states)
        hubs = hub_choices(tuple(dict.fromkeys(sources)), tuple(wanted), self.acquire)
        costs = hub_table(sources, hubs, self.move_cost(value))
        if value in self.memory_prices:
            memory_prices = [
                sum(self._memory_price(value, state) for state in sorted(hub.held, key=repr)) for hub in hubs
            ]
            costs = costs + torch.tensor(memory_prices, dtype=torch.float64)
        costs = costs + _preference(len(hubs))
        return hubs, self._from_producer(value, costs), tuple(offer_table(option, hubs) for option in options)

    def _from_producer(self, value: Value, costs: torch.Tensor) -> torch.Tensor:
        """The costs by the producer's strategy (rows); for an input or a constant, the only row."""
        return costs if value in self.producers else costs[0]

    def _table(self, value: Value, variable: int, costs: torch.Tensor) -> Table:
        """A table over the producer of a value, if it has one, and another variable."""
        if value not in self.producers:
            return Table((variable,), costs)
        return Table((self.variables[self.producers[value][0]], variable), costs)


def _preference(count: int) -> torch.Tensor:
    """Seconds added to each of several choices to break ties towards the first."""
    return TIE * torch.arange(count, dtype=torch.float64)


def _uses(draft: Draft) -> tuple[dict[Value, list[Use]], list[tuple[Operation, int]]]:
    """The uses of every value, and the operations with the positions of operands that they take as they are made."""
    uses: dict[Value, list[Use]] = {}
    ties: list[tuple[Operation, int]] = []
    for operation in draft.graph.operations:
        positions: dict[Value, list[int]] = {}
        tied = TIED.get(operation.op, ())
        ties += [(operation, position) for position in tied]
        for position, value in enumerate(operation.operands):
            if position not in tied:
                positions.setdefault(value, []).append(position)
        for value, found in positions.items():
            uses.setdefault(value, []).append(Use(operation, tuple(found)))
    return uses, ties
