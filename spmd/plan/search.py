"""The planner: every order of the mesh axes, one exact search an axis, and the cheapest plan of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import attrs
import torch

from spmd.atoms import Refinement, refine
from spmd.errors import PlanError
from spmd.graph import Graph, Operation, Value
from spmd.mesh import Mesh
from spmd.placement import Placement
from spmd.plan.boundary import bound
from spmd.plan.draft import Draft
from spmd.plan.finish import finish
from spmd.plan.machine import Machine
from spmd.plan.materialize import materialize
from spmd.plan.plan import Plan
from spmd.plan.problem import AxisProblem
from spmd.rules import RULES, find_rule
from spmd.rules.rule import Factors, Rule
from spmd.spec import DTensorSpec


def plan(
    graph: Graph,
    mesh: Mesh,
    input_specs: Sequence[DTensorSpec],
    output_specs: Sequence[DTensorSpec],
    *,
    rules: Mapping[torch._ops.OpOverload, Rule] = RULES,
    machine: Machine | None = None,
) -> Plan:
    """Decide how every value of a program lies on a mesh, so that a step takes the least predicted time.

    Mesh axes are planned one at a time, each exactly, in every order; before a search the effect of the axes that
    follow may be previewed by planning one of them alone. The cheapest of these plans wins, the earliest on a tie.

    Args:
        graph: the program over global tensors, in canonical form.
        mesh: the mesh.
        input_specs, output_specs: the spec of every input and output.
        rules: the sharding rules.
        machine: the machine's cost constants.

    Raises:
        PlanError: no plan satisfies the specs.
        RuleError: a rule contradicts its operator.
    """
    machine = machine or Machine()
    axes = tuple(name for name, size in mesh.axes.items() if size > 1)
    inputs = [_without_trivial_axes(spec, axes) for spec in input_specs]
    outputs = [_without_trivial_axes(spec, axes) for spec in output_specs]
    factors = _factorize(graph, rules)
    refinement = refine(graph, factors)
    plans = []
    for order in permutations(axes):
        bounded = bound(graph, refinement.values, mesh, inputs, outputs, order)
        draft = Draft(
            mesh=mesh,
            graph=bounded.graph,
            logical=bounded.logical,
            factors={operation: (found, refinement.factors[operation]) for operation, found in factors.items()},
            fixed=bounded.fixed,
            placed=bounded.placed,
            states={},
            strategies={},
            causes={},
        )
        plans += [finish(planned, machine) for planned in _plan_order(draft, order, machine)]
    return min(plans, key=lambda found: found.seconds)


def _plan_order(draft: Draft, order: Sequence[str], machine: Machine) -> list[Draft]:
    """The drafts that planning the axes in one order leads to, without and with previews."""
    if len(order) <= 1:
        return [_plan_axes(draft, order, machine, None)]
    return [_plan_axes(draft, order, machine, preview) for preview in (None, order[-1])]


def _plan_axes(draft: Draft, order: Sequence[str], machine: Machine, preview: str | None) -> Draft:
    guess: Mapping[Value, Placement] | None = None
    ranks = 1
    if preview is not None:
        ranks = draft.mesh.axis_size(preview)
        alone = AxisProblem(draft, preview, machine)
        guess = alone.solve().produced
    for axis in order:
        ahead = guess if axis != preview else None
        draft = materialize(draft, axis, AxisProblem(draft, axis, machine, ahead, ranks).solve())
    return draft


def _without_trivial_axes(spec: DTensorSpec, axes: tuple[str, ...]) -> DTensorSpec:
    """The spec without axes of one rank, which place nothing."""
    dims = tuple(tuple(axis for axis in dim if axis in axes) for dim in spec.dims)
    return attrs.evolve(spec, dims=dims, partial=tuple(item for item in spec.partial if item[0] in axes))


def _factorize(graph: Graph, rules: Mapping[torch._ops.OpOverload, Rule]) -> dict[Operation, Factors]:
    """The factors of every operation that has a rule."""
    found = {}
    for operation in graph.operations:
        rule = find_rule(operation.op, rules)
        if rule is not None:
            found[operation] = rule.factorize(operation.call())
    return found
