"""The planner's decisions on all mesh axes at once, as one sum of tables.

There is a variable for every operation (its strategies on all axes) and one, called a hub, for every value with several
consumers (the states acquired for them), numbered in the order of the program. The strategies, the moves and their
costs are those of the planner, which decides one axis after the other: each of its plans is an assignment here, unless
it acquires more states of a value than are allowed here. The planner acquires up to two per axis, so four on two axes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import attrs
import numpy as np
import torch

from proofs.joint.choices import all_choices, choice_seconds
from proofs.joint.moves import Acquired, Moves, State, find_acquired, find_moves
from spmd.errors import PlanError
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import FREE, REDISTRIBUTE
from spmd.plan.data.dataflow import fused_values
from spmd.plan.data.draft import flat_shape
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.search.finish import finish
from spmd.plan.search.insert_reshards import insert_reshards
from spmd.plan.search.prepare import prepare
from spmd.plan.search.problem import AxisProblem, Use
from spmd.plan.solver.elimination import minimize
from spmd.plan.solver.table import Table


@attrs.frozen(eq=False)
class _Hub:
    """The variable of a value with several consumers, the states it is produced and required in, and its choices."""

    variable: int
    sources: tuple[State, ...]
    wanted: tuple[State, ...]
    acquired: Acquired


class JointProblem:
    """The cost tables of a program for one nesting of the mesh axes; their sum is the predicted time of a plan.

    Args:
        request: the program, specs and options to plan.
        order: the mesh axes of more than one rank, major first.
        acquire: how many states may be acquired for one value.

    Raises:
        PlanError: no axis has more than one rank, or the request has a memory limit or `keep_sharded`, which the
            tables do not support.
    """

    def __init__(self, request: Request, order: Sequence[str], acquire: int = 2) -> None:
        if request.memory_limit is not None or request.keep_sharded:
            raise PlanError("The joint problem has no memory_limit and no keep_sharded (got one). Ask without them.")
        if not order:
            raise PlanError(f"Expected a mesh of more than one rank (got {request.mesh}): there is nothing to plan.")
        self.request, self.order, self.acquire = request, tuple(order), acquire
        self.draft = prepare(request).draft(order)
        axis = AxisProblem(self.draft, order[0], request.machine)
        self.uses, self.producers = axis.uses, axis.producers
        self.choices = all_choices(self.draft, order)
        self.domains: list[int] = []
        self.tables: list[Table] = []
        self.variables: dict[Operation, int] = {}
        self._hubs: dict[Value, _Hub] = {}
        self._moves: dict[Hashable, Moves] = {}
        self._acquired: dict[Hashable, Acquired] = {}
        self._number()
        self._write()

    def cost_of(self, plan: PlanData) -> float:
        """The least cost with a plan's strategies: its predicted time, or less if its reshards are not the cheapest."""
        given = self.draft.pinned
        mine = [o for o in self.draft.graph.operations if o not in given and o.op is not FREE]
        its = {operation.tensors: operation for operation in plan.graph.operations}
        allowed = [slice(count) for count in self.domains]
        for operation in mine:
            same = its[operation.tensors]
            choice = self.choices[operation].index(tuple(plan.strategies[same][axis] for axis in self.order))
            allowed[self.variables[operation]] = slice(choice, choice + 1)
        domains = [len(range(count)[part]) for count, part in zip(self.domains, allowed, strict=True)]
        tables = [Table(t.variables, t.costs[tuple(allowed[v] for v in t.variables)]) for t in self.tables]
        return minimize(domains, tables).cost

    def plan(self, choices: Sequence[int]) -> PlanData:
        """The planner's own plan with the strategies of an assignment; the planner chooses the reshards per axis.

        Its redistributions are not joined: the joint problem moves a value along one axis after the other.
        """
        chosen = {operation: self.choices[operation][choices[v]] for operation, v in self.variables.items()}
        draft, operations = self.draft, self.draft.graph.operations
        for position, axis in enumerate(self.order):
            only = dict(zip(operations, (choice[position] for choice in chosen.values()), strict=True))
            later = range(position + 1, len(self.order))
            preview = {
                value: {self.order[other]: chosen[operation][other].results[place] for other in later}
                for value, (operation, place) in self.producers.items()
            }
            solution = AxisProblem(draft, axis, self.request.machine, preview, only=only).solve()
            draft = insert_reshards(draft, axis, solution)
            operations = tuple(o for o in draft.graph.operations if o.op is not REDISTRIBUTE or o in draft.pinned)
        return finish(draft, self.request, joins=False).verify()

    def _number(self) -> None:
        """Number the variables."""
        graph = self.draft.graph
        for value in (*graph.inputs, *(value for value, _ in graph.constants)):
            self._number_hub(value)
        for operation in graph.operations:
            self.variables[operation] = self._variable(len(self.choices[operation]))
            for value in operation.tensors:
                self._number_hub(value)

    def _variable(self, choices: int) -> int:
        self.domains.append(choices)
        return len(self.domains) - 1

    def _number_hub(self, value: Value) -> None:
        uses = self.uses.get(value, ())
        if sum(len(use.positions) for use in uses) < 2:
            return
        sources = tuple(dict.fromkeys(self._sources(value)))
        wanted = tuple(dict.fromkeys(state for use in uses for states in self._wanted(use) for state in states))
        moves = self._moves_of(value, (*sources, *wanted))
        key = (id(moves), sources, wanted)
        if key not in self._acquired:
            self._acquired[key] = find_acquired(moves, sources, wanted, self.acquire)
        acquired = self._acquired[key]
        self._hubs[value] = _Hub(self._variable(len(acquired.offers)), sources, wanted, acquired)

    def _write(self) -> None:
        """Write the tables."""
        fused = self._fused_values()
        for operation, variable in self.variables.items():
            seconds = [
                choice_seconds(self.request.machine, self.draft, operation, self.order, choice, fused)
                for choice in self.choices[operation]
            ]
            self._add((variable,), np.array(seconds))
        for value, uses in self.uses.items():
            if value in self._hubs:
                self._write_hub(value, uses, self._hubs[value])
            else:
                wanted = [states[0] for states in self._wanted(uses[0])]
                sources = self._sources(value)
                moves = self._moves_of(value, (*sources, *wanted))
                self._write_value(value, self.variables[uses[0].operation], moves.between(sources, wanted))

    def _fused_values(self) -> frozenset[Value]:
        """The values without memory traffic in a plan, from which pinned operations that change nothing are removed."""
        same = {operation for operation, (before, after) in self.draft.pinned.items() if before == after}
        operations = (attrs.evolve(o, op=REDISTRIBUTE) if o in same else o for o in self.draft.graph.operations)
        return fused_values(attrs.evolve(self.draft.graph, operations=tuple(operations)))

    def _write_hub(self, value: Value, uses: Sequence[Use], hub: _Hub) -> None:
        place = {state: index for index, state in enumerate(hub.sources)}
        self._write_value(value, hub.variable, hub.acquired.seconds[[place[s] for s in self._sources(value)]])
        column = {state: index for index, state in enumerate(hub.wanted)}
        for use in uses:
            offered = [hub.acquired.offers[:, [column[s] for s in states]].all(1) for states in self._wanted(use)]
            self._add((hub.variable, self.variables[use.operation]), np.where(np.array(offered).T, 0.0, np.inf))

    def _write_value(self, value: Value, variable: int, seconds: np.ndarray) -> None:
        """A table between the producer of a value (rows) and another variable (columns)."""
        if value in self.producers:
            self._add((self.variables[self.producers[value][0]], variable), seconds)
        else:
            self._add((variable,), seconds[0])

    def _add(self, variables: tuple[int, ...], costs: np.ndarray) -> None:
        self.tables.append(Table(variables, torch.from_numpy(np.ascontiguousarray(costs))))

    def _sources(self, value: Value) -> tuple[State, ...]:
        """The state of a value under every choice of its producer."""
        if value not in self.producers:
            return (tuple(self.draft.given[value].placement(axis) for axis in self.order),)
        operation, place = self.producers[value]
        return tuple(tuple(strategy.results[place] for strategy in choice) for choice in self.choices[operation])

    def _wanted(self, use: Use) -> tuple[tuple[State, ...], ...]:
        """The states that each choice of a consumer requires the value in."""
        return tuple(
            tuple(dict.fromkeys(tuple(strategy.operands[place] for strategy in choice) for place in use.positions))
            for choice in self.choices[use.operation]
        )

    def _moves_of(self, value: Value, states: Sequence[State]) -> Moves:
        given = frozenset(placement for state in states for placement in state)
        key = (
            flat_shape(self.draft.logical[value]),
            value.meta.dtype,
            given,
            self.draft.latency_shares.get(value, 1.0),
        )
        if key not in self._moves:
            self._moves[key] = find_moves(self.request.machine, self.request.mesh, self.order, *key)
        return self._moves[key]
