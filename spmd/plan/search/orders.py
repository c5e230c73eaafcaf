"""The planner: every order of the mesh axes, one exact search an axis, and the cheapest plan of all."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import permutations
from types import MappingProxyType

import attrs

from spmd.core.single_threaded import single_threaded
from spmd.ir.graph import Value
from spmd.plan.data.draft import Draft, States
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.machine.machine import Machine
from spmd.plan.memory.limit import fit, fits, fitting, memory_prices
from spmd.plan.memory.peak import memory_of
from spmd.plan.search.finish import finish
from spmd.plan.search.insert_reshards import insert_reshards
from spmd.plan.search.prepare import Prepared, prepare
from spmd.plan.search.problem import AxisChoice, AxisProblem


def plan(request: Request) -> PlanData:
    """Decide how every value of a program lies on a mesh, so that a step takes the least predicted time.

    Mesh axes are planned one at a time, each exactly, in every order (of four axes and more, in some orders); the best
    order once more, at the sizes that its later axes left when they were planned first. Of the plans within 2% of the
    fastest, the one that sends the fewest bytes wins, the earliest on a tie. Under a memory limit, each is first made
    to fit; if none can be, what is held is charged for, and the search repeated.

    Raises:
        PlanError: no plan satisfies the specs, or none that was found fits in the memory limit.
        RuleError: a rule contradicts its operator.
    """
    with single_threaded():
        prepared = prepare(request)
        found = list(map(fit, _plans(prepared, {})))
        for price in PRICE_LEVELS:
            if any(map(fits, found)):
                break
            smallest = min(found, key=lambda plan: memory_of(plan).peak)
            found += map(fit, _plans(prepared, memory_prices(smallest, price)))
    return _best(fitting(found)).verify()


PRICE_LEVELS = (0.1, 1.0, 10.0)
"""What holding all that the smallest plan holds counts for, in times of its step; tried while no plan fits."""


def _plans(prepared: Prepared, memory_prices: Mapping[Value, float]) -> list[PlanData]:
    """The plans of all orders."""
    request = prepared.request
    axes = tuple(name for name, size in request.mesh.axes.items() if size > 1)

    starts = {order: prepared.draft(order) for order in _orders(axes)}
    blind = {order: _plan_axes(start, order, request.machine, memory_prices) for order, start in starts.items()}
    plans = {order: finish(steps[-1].draft if steps else starts[order], request) for order, steps in blind.items()}
    found = list(plans.values())
    if len(axes) > 1:
        best = min(plans, key=lambda order: plans[order].seconds)
        steps, preview = blind[best], blind[best[::-1]][-1].draft.states
        refined = _plan_axes(starts[best], best, request.machine, memory_prices, steps, preview)
        if refined[-1] is not steps[-1]:
            found.append(finish(refined[-1].draft, request))
    return found


NEAR = 1.02
"""Plans whose predicted times differ by less than this factor are as good as each other: no prediction is sharper."""


def _best(plans: Sequence[PlanData]) -> PlanData:
    """Of the plans that are about the fastest, the one that sends the fewest bytes; the earliest on a tie."""
    fastest = min(found.seconds for found in plans)
    return min(
        (found for found in plans if found.seconds <= NEAR * fastest),
        key=lambda found: sum(comm.bytes for comm in found.comms),
    )


def _orders(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """The orders to plan axes in: all of up to three axes, else the rotations of mesh order and of its reverse."""
    if len(axes) <= 3:
        return list(permutations(axes))
    turns = [(*axes[turn:], *axes[:turn]) for turn in range(len(axes))]
    return turns + [turn[::-1] for turn in turns]


_NO_PREVIEW: Mapping[Value, States] = MappingProxyType({})


@attrs.frozen(eq=False)
class _Step:
    """One axis of an order: what is chosen, and the draft with it."""

    choice: AxisChoice
    draft: Draft


def _plan_axes(
    draft: Draft,
    order: Sequence[str],
    machine: Machine,
    memory_prices: Mapping[Value, float],
    blind: Sequence[_Step] = (),
    preview: Mapping[Value, States] = _NO_PREVIEW,
) -> list[_Step]:
    """Plan axes one after another, at the sizes that guessed placements on later axes leave.

    As long as the choices are those of the `blind` steps of the same order, so are the drafts, and the last step with
    them.
    """
    steps: list[_Step] = []
    for position, axis in enumerate(order):
        same = bool(blind) and all(map(operator.is_, steps, blind))
        later = order[position + 1 :]
        if same and not later:
            return [*steps, blind[position]]
        ahead = {value: {a: s for a, s in states.items() if a in later} for value, states in preview.items()}
        choice = AxisProblem(draft, axis, machine, ahead, memory_prices=memory_prices).solve()
        same = same and choice.equals(blind[position].choice)
        steps.append(blind[position] if same else _Step(choice, insert_reshards(draft, axis, choice)))
        draft = steps[-1].draft
    return steps
