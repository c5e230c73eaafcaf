"""The planner: every order of the mesh axes, one exact search an axis, and the cheapest plan of all."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations

import torch

from spmd.atoms import Refinement, refine
from spmd.graph import Graph, Operation, Value, freeze
from spmd.plan.boundary import bound
from spmd.plan.draft import Draft, States
from spmd.plan.finish import finish
from spmd.plan.machine import Machine
from spmd.plan.materialize import materialize
from spmd.plan.plan import Plan
from spmd.plan.problem import AxisProblem
from spmd.plan.request import Request
from spmd.rules import find_rule
from spmd.rules.random import DRAW
from spmd.rules.rule import Factors, Rule
from spmd.rules.strategy import Strategy, derive_strategies


def plan(request: Request) -> Plan:
    """Decide how every value of a program lies on a mesh, so that a step takes the least predicted time.

    Mesh axes are planned one at a time, each exactly, in every order (of four axes and more, in some orders); the best
    order once more, at the sizes that its later axes turned out to leave. The cheapest of these plans wins, the
    earliest on a tie.

    Raises:
        PlanError: no plan satisfies the specs.
        RuleError: a rule contradicts its operator.
    """
    graph, mesh, machine = request.graph, request.mesh, request.machine
    axes = tuple(name for name, size in mesh.axes.items() if size > 1)
    factors = _factorize(graph, request.rules)
    refinement = refine(graph, factors)
    options = _derive(graph.operations, factors, refinement)

    def start(order: Sequence[str]) -> Draft:
        bounded = bound(graph, refinement.values, mesh, request.input_specs, request.output_specs, order)
        return Draft(
            mesh=mesh,
            graph=bounded.graph,
            logical=bounded.logical,
            options=options,
            fixed=bounded.fixed,
            placed=bounded.placed,
            states={},
            strategies={},
            exact=True,
        )

    with _one_thread():
        blind = [(order, _plan_axes(start(order), order, machine, {})) for order in _orders(axes)]
        plans = [finish(draft, request) for _, draft in blind]
        if len(axes) > 1:
            order, draft = blind[min(range(len(plans)), key=lambda index: plans[index].seconds)]
            plans.append(finish(_plan_axes(start(order), order, machine, draft.states), request))
    return min(plans, key=lambda found: found.seconds).verify()


def _orders(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """The orders to plan axes in: all of up to three axes, else the rotations of mesh order and of its reverse."""
    if len(axes) <= 3:
        return list(permutations(axes))
    turns = [(*axes[turn:], *axes[:turn]) for turn in range(len(axes))]
    return turns + [turn[::-1] for turn in turns]


def _plan_axes(draft: Draft, order: Sequence[str], machine: Machine, preview: Mapping[Value, States]) -> Draft:
    for position, axis in enumerate(order):
        later = order[position + 1 :]
        ahead = {value: {a: s for a, s in states.items() if a in later} for value, states in preview.items()}
        draft = materialize(draft, axis, AxisProblem(draft, axis, machine, ahead).solve())
    return draft


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The search is many small tensor operations: threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _derive(
    operations: Iterable[Operation], factors: Mapping[Operation, Factors], refinement: Refinement
) -> dict[Operation, tuple[Strategy, ...]]:
    """The strategies on one mesh axis of every operation that has factors, over the atoms of the program."""
    known: dict[Hashable, tuple[Strategy, ...]] = {}
    found = {}
    for operation in operations:
        if operation not in factors:
            continue
        logical = tuple(refinement.values[value] for value in (*operation.operands, *operation.tensors))
        atoms = refinement.factors[operation]
        key = (id(factors[operation]), tuple(atoms.items()), logical)
        if key not in known:
            count = len(operation.operands)
            known[key] = derive_strategies(factors[operation], atoms, (logical[:count], logical[count:]))
        found[operation] = known[key]
    return found


def _factorize(graph: Graph, rules: Mapping[torch._ops.OpOverload, Rule]) -> dict[Operation, Factors]:
    """The factors of every operation that has a rule; the same object for calls that are alike."""
    known: dict[Hashable, Factors] = {}
    found = {}
    for operation in graph.operations:
        rule = DRAW if operation.draws else find_rule(operation.op, rules)
        if rule is None:
            continue
        call = operation.call()
        key = (call.op, freeze(call.args), freeze(dict(call.kwargs)), call.results)
        if key not in known:
            known[key] = rule.factorize(call)
        found[operation] = known[key]
    return found
