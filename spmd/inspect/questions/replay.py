"""Rebuilds the optimization problem of a plan on one mesh axis, with all other axes as planned."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import attrs

from spmd.core.placement import Placement, Replicate
from spmd.errors import PlanError
from spmd.ir.graph import Operation, Value
from spmd.plan.cost.account import send_seconds, sends
from spmd.plan.cost.local_cost import LocalCost
from spmd.plan.data.draft import Draft
from spmd.plan.data.plan import PlanData
from spmd.plan.search.boundary import carry_over
from spmd.plan.search.candidates import all_candidates
from spmd.plan.search.hubs import Move, hub_choices, plan_moves
from spmd.plan.search.insert_reshards import insert_reshards
from spmd.plan.search.prepare import Prepared
from spmd.plan.search.problem import AxisChoice, AxisProblem
from spmd.rules.strategy import Strategy


@attrs.frozen
class Figures:
    """The cost of a step: predicted seconds, and bytes sent per rank."""

    seconds: float
    bytes: float

    def __sub__(self, other: Figures) -> Figures:
        return Figures(self.seconds - other.seconds, self.bytes - other.bytes)


@attrs.frozen(eq=False)
class Replay:
    """The problem of a plan on one mesh axis, and the plan's solution.

    Args:
        problem: the problem of the axis, with the other axes as planned and the plan's strategies fixed.
        candidates: the strategies of every operation on the axis.
        choice: the solution that the plan has.
    """

    problem: AxisProblem
    candidates: Mapping[Operation, tuple[Strategy, ...]]
    choice: AxisChoice

    def local_seconds(self, operation: Operation, strategy: Strategy) -> float:
        """Seconds of an operation with a strategy, with the collectives inside its local implementation."""
        return self.problem.cost.seconds(operation, strategy, self.problem.axis)

    def source(self, value: Value, changed: Mapping[Operation, Strategy]) -> Placement:
        """The placement in which a value is produced if some operations had the strategies `changed`."""
        return self.problem.source(value, {**self.choice.strategies, **changed})

    def moves(self, value: Value, changed: Mapping[Operation, Strategy]) -> tuple[tuple[Move, ...], float]:
        """The cheapest moves of a value to all placements that its consumers require, and their seconds.

        As in the search, the moves lead to a *hub*, the set of placements in which a value with several consumers is
        acquired, each paid for once: a replica, of which every shard is a slice, or up to two other placements.

        Args:
            value: the value.
            changed: operations with other strategies than the plan's.
        """
        source = self.source(value, changed)
        strategies = {**self.choice.strategies, **changed}
        wanted = dict.fromkeys(
            state for use in self.problem.uses.get(value, ()) for state in use.wanted(strategies[use.operation])
        )
        hubs = [hub for hub in hub_choices((source,), tuple(wanted), 2) if all(map(hub.offers, wanted))]
        found = [plan_moves(source, hub, self.problem.move_cost(value)) for hub in hubs] if wanted else [((), 0.0)]
        return min(found, key=lambda pair: pair[1])

    def replan(self, operation: Operation, strategy: Strategy) -> Figures:
        """The cost of a step if an operation's strategy on this axis is fixed and the axis is planned again.

        Infinite if no plan with this strategy satisfies the given specs.
        """
        problem = self.problem
        try:
            choice = AxisProblem(problem.draft, problem.axis, problem.machine, only={operation: strategy}).solve()
        except PlanError:
            return Figures(math.inf, math.inf)
        return _figures(problem, choice)

    @property
    def figures(self) -> Figures:
        """The cost of a step with the plan's choices."""
        return _figures(self.problem, self.choice)


def replay(plan: PlanData, prepared: Prepared, axis: str) -> Replay:
    """Repeat a plan's decisions on all axes but one, and rebuild the problem of that axis.

    Args:
        plan: the plan.
        prepared: its request, prepared.
        axis: the axis to rebuild the problem of, after all others.
    """
    decided = {value: chosen for operation, chosen in plan.strategies.items() for value in operation.tensors}
    machine = plan.request.machine
    draft = prepared.draft(plan.order)
    decided |= _free_outputs(plan, draft)
    for other in plan.order:
        if other != axis:
            problem = AxisProblem(draft, other, machine, only=_decided(draft, decided, other))
            draft = insert_reshards(draft, other, problem.solve())
    problem = AxisProblem(draft, axis, machine, only=_decided(draft, decided, axis))
    return Replay(problem, all_candidates(draft, axis), problem.solve())


def _free_outputs(plan: PlanData, draft: Draft) -> dict[Value, Mapping[str, Strategy]]:
    """The strategies of the outputs whose specs the planner chose."""
    found: dict[Value, Mapping[str, Strategy]] = {}
    pairs = zip(draft.graph.outputs, plan.graph.outputs, plan.request.output_specs, strict=True)
    for value, planned, given in pairs:
        if given is None:
            spec = carry_over(plan.specs[planned], draft.logical[value], plan.order)
            states = {axis: spec.placement(axis) for axis in plan.order}
            found[value] = {axis: Strategy((state,), (state,), label=str(state)) for axis, state in states.items()}
    return found


def _decided(draft: Draft, decided: Mapping[Value, Mapping[str, Strategy]], axis: str) -> dict[Operation, Strategy]:
    """The plan's strategies on an axis, for the operations of a draft that produce the same values."""
    found = {}
    for operation in draft.graph.operations:
        chosen = next((decided[value] for value in operation.tensors if value in decided), None)
        if operation not in draft.pinned and chosen is not None:
            found[operation] = chosen[axis]
    return found


def _figures(problem: AxisProblem, choice: AxisChoice) -> Figures:
    draft = insert_reshards(problem.draft, problem.axis, choice)
    cost = LocalCost.of(problem.machine, draft)
    specs = draft.specs()
    sent = {operation: sends(draft, specs, operation) for operation in draft.graph.operations}
    seconds = (send_seconds(problem.machine, draft, operation, found) for operation, found in sent.items())
    return Figures(
        math.fsum(
            [
                *(cost.planned_seconds(operation) for operation in draft.graph.operations),
                *itertools.chain.from_iterable(seconds),
            ]
        ),
        math.fsum(size for found in sent.values() for _, _, size in found),
    )


def states_of(draft: Draft, value: Value, axis: str, state: Placement) -> dict[str, Placement]:
    """The placements of a value of a draft by mesh axis, with one more axis."""
    states = dict(draft.states.get(value, {}))
    return states if state == Replicate() else {**states, axis: state}
