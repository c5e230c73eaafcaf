"""Planning under a memory limit: reordering, rematerialization, and memory prices.

The plan of least time is taken as it is if it fits. If not, its collectives run alone, and its outputs are computed one
after another (`reorder`). Then values are freed across the peak and rematerialized after it (`rematerialization`),
first those that free the most bytes per added second, until every peak fits. Where that is not enough, the search is
repeated with prices on the memory that is held (`memory_prices`), the Lagrange multipliers of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import attrs

from spmd.core.mesh import Coordinate
from spmd.errors import PlanError
from spmd.ir.dataflow import is_read_by_items
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import MARKERS, REDISTRIBUTE
from spmd.ir.source import Source
from spmd.plan.cost.account import account, launched
from spmd.plan.data.plan import AnyPlan, PlanData
from spmd.plan.local.fragments import Known
from spmd.plan.local.variants import plan_at
from spmd.plan.memory.liveness import Buffer, Liveness, liveness_of
from spmd.plan.memory.peak import Memory, fullest, measure, memory_of
from spmd.plan.memory.rematerialization import Rematerialization, Rewritten, candidates, rewrite
from spmd.plan.memory.reorder import by_results

_LAUNCH = 1e-7
"""Seconds added to the cost of every operation, so that many small ones are not preferred to one large one."""

_ROUNDS = 1000
"""The most rounds of rematerialization; each one lowers the memory at the operation that holds the most."""


def fitting(plans: Sequence[PlanData]) -> list[PlanData]:
    """Those of several plans for one request that fit in its memory limit.

    Raises:
        PlanError: none fits; the message has the smallest peak found and the tensors held there.
    """
    found = list(filter(fits, plans))
    if not found:
        raise _refusal(min(plans, key=lambda plan: memory_of(plan).peak))
    return found


def memory_prices(plan: PlanData, price: float) -> dict[Value, float]:
    """Memory prices, in seconds per byte, of the values held at a plan's peak.

    A redistributed value is priced as the value that it is made from. Inputs and constants have a price only if loops
    read them item by item, as stacked layers, which may be gathered trip by trip.

    Args:
        plan: the plan.
        price: the price of the whole peak, as a multiple of the plan's predicted time.
    """
    held = (item.value for item in memory_of(plan).held if item.value is not None)
    priced = dict.fromkeys(value for each in held if (value := _priced(plan.graph, each)) is not None)
    return dict.fromkeys(priced, price * plan.seconds / memory_of(plan).peak)


def _priced(graph: Graph, held: Value) -> Value | None:
    """The value that one at the peak is made from, if it may have a price."""
    is_stack = is_read_by_items(graph, held)
    passed = (REDISTRIBUTE,) if is_stack else MARKERS
    value = graph.origin(held, lambda operation: operation.op in passed)
    return value if value in graph.producers or (is_stack and value is not held) else None


def fit(plan: PlanData) -> PlanData:
    """The plan if it fits in its request's limit, else an equivalent one in less memory.

    If none fits, the result is the plan with the lowest peak that was found.
    """
    if fits(plan):
        return plan
    plan = launched(plan, None)
    if fits(plan):
        return plan
    found = _reordered(plan)
    if fits(found):
        return found
    return min((_lower_peaks(found), found, plan), key=lambda found: memory_of(found).peak)


def check_fits(plan: AnyPlan) -> AnyPlan:
    """Check that a plan fits in its request's memory limit; returns the plan itself.

    Raises:
        PlanError: its peak is above the limit.
    """
    if not fits(plan):
        memory = memory_of(plan)
        raise PlanError(
            f"The given plan holds {memory.peak:,} bytes per rank at {memory.place}, and memory_limit is "
            f"{plan.request.memory_limit:,}. Plan again with this limit, and save the new plan."
        )
    return plan


def fits(plan: PlanData) -> bool:
    """Whether a plan's peak is within the memory limit of its request, if there is one."""
    limit = plan.request.memory_limit
    return limit is None or memory_of(plan).peak <= limit


def _refusal(plan: PlanData) -> PlanError:
    memory = memory_of(plan)
    return PlanError(
        f"No plan was found that holds at most memory_limit={plan.request.memory_limit:,} bytes per rank: the "
        f"smallest peak found is {memory.peak:,} bytes, at {memory.place}. Held there:\n{memory.largest()}\n"
        "  Raise the limit, shard arguments or results over more ranks (in_specs, out_specs), donate arguments that "
        "are not needed after the call (donate_argnums), or take a smaller batch."
    )


def _reordered(plan: PlanData) -> PlanData:
    placed = by_results(plan.graph)
    origins = {new: old for old, new in placed.items()}
    ordered = _replace(plan, Rewritten(tuple(placed.values()), origins, {}))
    return attrs.evolve(ordered, comms=account(ordered).all_comms)


def _lower_peaks(plan: PlanData) -> PlanData:
    """Rematerialize values across every peak above the limit, until all fit or nothing more can be freed."""
    limit = plan.request.memory_limit
    assert limit is not None
    costs = _costs_of_a_second_run(plan)
    best, least = plan, memory_of(plan).peak
    # A rank whose program differs inside manual regions has other operations there, which the plan cannot change.
    known: dict[Coordinate, Known] = {place: {} for place in fullest(plan) if plan_at(plan, place) is plan}
    for _ in range(_ROUNDS):
        memory, liveness = _above(plan, known, limit)
        if memory.peak < least or memory.peak <= limit:
            best, least = plan, memory.peak
        if memory.peak <= limit or memory.operation is None:
            break
        # The sort is stable: among equal ones the earliest comes first, which would be held longest.
        found = sorted(
            candidates(plan.graph, liveness, memory.operation), key=lambda item: -item.freed / costs[item.operation]
        )
        chosen = _enough(found, memory.peak - limit, liveness)
        if not chosen:
            break
        changed = rewrite(plan.graph, liveness, memory.operation, chosen)
        costs = {operation: costs[changed.origins[operation]] for operation in changed.operations}
        plan = _replace(plan, changed)
    found_account = account(best)
    return attrs.evolve(best, comms=found_account.all_comms, seconds=found_account.total)


def _above(plan: PlanData, known: Mapping[Coordinate, Known], limit: int) -> tuple[Memory, Liveness]:
    """The memory and liveness of the first of some ranks that is above the limit; of the last if none is."""
    for place, fragments in known.items():
        liveness = liveness_of(plan, fragments, place)
        memory = measure(liveness, plan.request.donated, _source)
        if memory.peak > limit:
            break
    return memory, liveness


def _source(operation: Operation) -> Source | None:
    return operation.source


def _costs_of_a_second_run(plan: PlanData) -> dict[Operation, float]:
    """Seconds that a second run of each operation would add: its collectives and its memory traffic."""
    machine, comms, zero = plan.request.machine, account(plan).comms, (0,) * len(plan.mesh.names)
    runs = plan.graph.regions.runs

    def nbytes(value: Value) -> int:
        return math.prod(plan.layout(value).shape(zero)) * value.meta.dtype.itemsize

    def seconds(operation: Operation) -> float:
        copies = machine.copy_seconds(sum(map(nbytes, operation.operands)), sum(map(nbytes, operation.tensors)))
        sent = sum(comm.seconds for comm in comms.get(operation, ()))
        return runs(operation) * (_LAUNCH + copies) + sent

    return {operation: seconds(operation) for operation in plan.graph.operations}


def _enough(found: Sequence[Rematerialization], excess: int, liveness: Liveness) -> list[Rematerialization]:
    """The first candidates that together free `excess` bytes; none reads a buffer that another one frees."""
    chosen: list[Rematerialization] = []
    freed: set[Buffer] = set()
    kept: set[Buffer] = set()
    for item in found:
        sources = {liveness.buffers[value] for value in item.operation.operands}
        if excess <= 0:
            break
        if item.buffer in kept or sources & freed:
            continue
        chosen.append(item)
        freed.add(item.buffer)
        kept |= sources
        excess -= item.freed
    return chosen


def _replace(plan: PlanData, changed: Rewritten) -> PlanData:
    """The plan with other operations; its collectives and predicted time are not updated."""
    origins, copies = changed.origins, changed.copies
    strategies = {o: plan.strategies[origins[o]] for o in changed.operations if origins[o] in plan.strategies}
    fallbacks = frozenset(plan.fallbacks)
    return attrs.evolve(
        plan,
        graph=attrs.evolve(plan.graph, operations=changed.operations).verify(),
        logical=MappingProxyType({**plan.logical, **{new: plan.logical[old] for new, old in copies.items()}}),
        specs=MappingProxyType({**plan.specs, **{new: plan.specs[old] for new, old in copies.items()}}),
        strategies=MappingProxyType(strategies),
        fallbacks=tuple(o for o in changed.operations if origins[o] in fallbacks),
    )
