"""The planner: plans the mesh axes in every order, one search per axis, and takes the best plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from types import MappingProxyType

import attrs

from spmd.core.single_threaded import single_threaded
from spmd.ir.graph import Value
from spmd.plan.data.assignment import States
from spmd.plan.data.draft import Draft
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.machine.machine import Machine
from spmd.plan.memory.limit import fit, fits, fitting, memory_prices
from spmd.plan.memory.peak import memory_of
from spmd.plan.schedule.choice import best_schedule
from spmd.plan.search.finish import finish
from spmd.plan.search.folding import Folded
from spmd.plan.search.insert_reshards import insert_reshards
from spmd.plan.search.never_gathered import allowed, refusal
from spmd.plan.search.options import SEARCH, SearchOptions
from spmd.plan.search.prepare import Prepared, prepare
from spmd.plan.search.problem import AxisChoice, AxisProblem
from spmd.plan.search.trip_by_trip import trip_by_trip
from spmd.plan.search.unfolding import unfold
from spmd.plan.solver.elimination import NoAssignmentError


def plan(request: Request, search: SearchOptions = SEARCH) -> PlanData:
    """Choose the sharding of every value of a program, so that one run takes the least predicted time.

    Mesh axes are planned one at a time, in every order (with four axes or more, in some orders). The best order is
    planned once more, this time with a guess of the placements on later axes: those of the plan in the reverse order.
    Equal layers are planned once (`spmd.plan.search.folding`).
    Of the plans within 2% of the fastest, the one that sends the fewest bytes is taken, the earliest on a tie. Under a
    memory limit, every plan is first made to fit. If none fits, the search is repeated with memory prices (Lagrange
    multipliers of the limit). Last comes the schedule of its launches, and where loops reshard stacks: around their
    trips or in them. Where launches are much of the predicted time, a plan for which they counted twice is simulated,
    too.

    Args:
        request: the program, the mesh, the specs and the constraints.
        search: the solver, and parts that are left out.

    Raises:
        PlanError: no plan satisfies `keep_sharded`, or none that was found fits in the memory limit.
        RuleError: a rule contradicts its operator.
    """
    with single_threaded():
        prepared = prepare(request, search)
        known = _Fitted()
        found = _fitted_plans(prepared, known)
        if prepared.repeats and not any(map(fits, found)):  # layers that differ may fit
            found += _fitted_plans(prepared.unfolded(), known)
        best = _best(fitting(found))
        first, *others = (each for plan in (best, *_with_fewer_launches(best, prepared)) for each in _variants(plan))
        return best_schedule(first, *others).verify()


class _Fitted:
    """Makes plans fit, each once: memory prices, and layers that may differ, often lead to a plan that is known."""

    def __init__(self) -> None:
        self.known: set[Hashable] = set()

    def new(self, plans: Sequence[PlanData]) -> list[PlanData]:
        """The plans that are not known, made to fit."""
        new: dict[Hashable, PlanData] = {}
        for plan in plans:
            layouts = tuple((value.name, plan.layout(value)) for value in plan.specs)
            if layouts not in self.known:
                new.setdefault(layouts, plan)
        self.known.update(new)
        return list(map(fit, new.values()))


def _fitted_plans(prepared: Prepared, fitted: _Fitted) -> list[PlanData]:
    """The new plans that the search finds, each made to fit; with memory prices if none does without.

    Where the plans without prices are known, so are those with prices as a rule: they are not searched.
    """
    machine = prepared.request.machine
    found = fitted.new(_allowed_plans(prepared, machine))
    for price in PRICE_LEVELS if found else ():
        if any(map(fits, found)):
            break
        smallest = min(found, key=lambda plan: memory_of(plan).peak)
        found += fitted.new(_allowed_plans(prepared, machine, memory_prices(smallest, price)))
    return found


def _variants(plan: PlanData) -> Iterator[PlanData]:
    """The plan, and the one that reshards stacks trip by trip, if it has loops that can."""
    yield plan
    if (moved := trip_by_trip(plan)) is not None:
        yield moved


PRICE_LEVELS = (0.1, 1.0, 10.0, 100.0)
"""Memory prices of the lowest peak found, as multiples of its plan's predicted time; tried until a plan fits."""


def _with_fewer_launches(best: PlanData, prepared: Prepared) -> list[PlanData]:
    """A plan which the search finds if launches take twice as long, if they are much of the time of the best plan.

    The search counts launches one by one. In a schedule they wait for each other, so that a plan with fewer of them may
    be as fast, or faster.
    """
    machine = prepared.request.machine
    if not prepared.search.fewer_launches or not machine.links:  # its latencies are shares of those of buckets
        return []
    launches = {c.launch: c.times * machine.collective_seconds(c.kind, c.axes, 0.0) for c in best.comms}
    if sum(launches.values()) <= _MUCH * best.seconds:
        return []
    found = [plan for plan in _allowed_plans(prepared, machine.with_launch_times(2.0)) if fits(plan)]
    if not found:
        return []
    other = _best(found)
    gap = max(other.gap, (1 + best.gap) * other.seconds / best.seconds - 1)
    return [attrs.evolve(other, gap=gap)]


_MUCH = 0.1
"""The part of a plan's predicted time that is much for the latencies and waits of its launches."""


def _allowed_plans(
    prepared: Prepared, machine: Machine, memory_prices: Mapping[Value, float] = MappingProxyType({})
) -> list[PlanData]:
    """Filter `_plans` by `keep_sharded`; PlanError if none is left."""
    try:
        return allowed(_plans(prepared, machine, memory_prices))
    except NoAssignmentError:
        if prepared.repeats:
            return _allowed_plans(prepared.unfolded(), machine, memory_prices)
        at_a_price = attrs.evolve(prepared, request=attrs.evolve(prepared.request, gather_seconds=_GATHER_SECONDS))
        raise refusal(_plans(at_a_price, machine)) from None


_GATHER_SECONDS = 1e3
"""Seconds for gathering what is to be kept: more than any program takes, so that the least is gathered."""


def _plans(
    prepared: Prepared, machine: Machine, memory_prices: Mapping[Value, float] = MappingProxyType({})
) -> list[PlanData]:
    """The plans of all orders for the request's machine, as a search with the prices of `machine` finds them."""
    request, search = prepared.request, prepared.search
    axes = tuple(name for name, size in request.mesh.axes.items() if size > 1)

    starts = dict(zip(_orders(axes), prepared.starts(_orders(axes)), strict=True))
    plan_axes = partial(_plan_axes, machine, search, memory_prices, {})
    blind = {order: plan_axes(start, order) for order, start in starts.items()}

    def finished(order: tuple[str, ...], steps: Sequence[_Step]) -> PlanData:
        start = starts[order]
        return finish(unfold(start, steps[-1].draft if steps else start.draft), request, search.joins)

    plans = {order: finished(order, steps) for order, steps in blind.items()}
    found = list(plans.values())
    if len(axes) > 1:
        best = min(plans, key=lambda order: plans[order].seconds)
        steps, preview = blind[best], blind[best[::-1]][-1].draft.states
        refined = plan_axes(starts[best], best, preview)
        if refined[-1] is not steps[-1]:
            found.append(finished(best, refined))
    return found


NEAR = 1.02
"""Plans whose predicted times are within this factor count as equally fast: predictions are not more accurate."""


def _best(plans: Sequence[PlanData]) -> PlanData:
    """Of the plans within `NEAR` of the fastest, the one that sends the fewest bytes; the earliest on a tie."""
    fastest = min(found.seconds for found in plans)
    return min(
        (found for found in plans if found.seconds <= NEAR * fastest),
        key=lambda found: sum(comm.bytes for comm in found.comms),
    )


def _orders(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """The orders to plan axes in: all for up to three axes, else the rotations of mesh order and their reverses."""
    if len(axes) <= 3:
        return list(permutations(axes))
    turns = [(*axes[turn:], *axes[:turn]) for turn in range(len(axes))]
    return turns + [turn[::-1] for turn in turns]


_NO_PREVIEW: Mapping[Value, States] = MappingProxyType({})


@attrs.frozen(eq=False)
class _Step:
    """One axis of an order: the choice for it, and the draft after it."""

    choice: AxisChoice
    draft: Draft


def _plan_axes(
    machine: Machine,
    search: SearchOptions,
    memory_prices: Mapping[Value, float],
    known: dict[tuple[Draft, str], _Step],
    start: Folded,
    order: Sequence[str],
    preview: Mapping[Value, States] = _NO_PREVIEW,
) -> list[_Step]:
    """Plan axes one after another, with local sizes reduced by the guessed placements on later axes.

    Args:
        machine: the cost constants.
        search: has the solver.
        memory_prices: as for `AxisProblem`.
        known: the steps without a preview, by the draft before them and the axis; new ones are added. Steps with one
            that make the same choices are these.
        start: the program to begin with.
        order: the axes in planning order.
        preview: guessed placements of values on all axes.
    """
    steps: list[_Step] = []
    draft, memory_prices = start.draft, start.prices(memory_prices)
    for position, axis in enumerate(order):
        later = order[position + 1 :]
        guesses = preview if later else _NO_PREVIEW
        step = known.get((draft, axis))
        if step is None or guesses:
            ahead = {value: {a: s for a, s in states.items() if a in later} for value, states in guesses.items()}
            choice = AxisProblem(draft, axis, machine, ahead, memory_prices=memory_prices).solve(search)
            if step is None or not choice.equals(step.choice):
                step = _Step(choice, insert_reshards(draft, axis, choice))
        if not guesses:
            known[draft, axis] = step
        steps.append(step)
        draft = step.draft
    return steps
