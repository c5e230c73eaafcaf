"""Planning under a memory limit: another order of execution, and computing again what is too large to keep.

The plan of least time is taken as it is if it fits. If not, results are computed one after the other (`reorder`), and
then values are freed across the peak and computed again (`rematerialization`), first those that free the most bytes
for a second more, until every peak fits. Where that is not enough, the search is repeated with a price on the memory
that is held (`memory_prices`), as Lagrange multipliers of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TypeVar

import attrs

from spmd.errors import PlanError
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE, RELABEL
from spmd.plan.cost.account import account
from spmd.plan.data.plan import PlanData
from spmd.plan.memory.liveness import Buffer, Liveness, record
from spmd.plan.memory.peak import measure, memory_of
from spmd.plan.memory.rematerialization import Rematerialization, Rewritten, candidates, rewrite
from spmd.plan.memory.reorder import by_results

AnyPlan = TypeVar("AnyPlan", bound=PlanData)

_LAUNCH = 1e-7
"""Seconds that any operation costs, so that many small ones are not preferred to one large one."""

_ROUNDS = 1000
"""Peaks to cut down before giving up; each round cuts the highest one."""


def fitting(plans: Sequence[PlanData]) -> list[PlanData]:
    """Those of some plans for one request that fit in its memory limit.

    Raises:
        PlanError: none fits; says the smallest peak found and what is held there.
    """
    found = list(filter(fits, plans))
    if not found:
        raise _refusal(min(plans, key=lambda plan: memory_of(plan).peak))
    return found


def memory_prices(plan: PlanData, price: float) -> dict[Value, float]:
    """Seconds that each byte counts for of the temporaries held at a plan's peak.

    Args:
        plan: the plan.
        price: what all that is held there is to count for, in times of the plan's step.
    """
    producers = {value: operation for operation in plan.graph.operations for value in operation.tensors}
    found = {}
    for item in memory_of(plan).held:
        value = item.value
        while value in producers and producers[value].op in (REDISTRIBUTE, RELABEL):
            value = producers[value].operands[0]
        if value in producers:
            found[value] = price * plan.seconds / memory_of(plan).peak
    return found


def fit(plan: PlanData) -> PlanData:
    """The plan, if it fits in the request's limit, or one that computes the same in less memory.

    Where none fits, the one of the least memory that was found.
    """
    if fits(plan):
        return plan
    ordered = _reordered(plan)
    if fits(ordered):
        return ordered
    return min((_cut_peaks(ordered), ordered, plan), key=lambda found: memory_of(found).peak)


def check_fits(plan: AnyPlan) -> AnyPlan:
    """The plan, as it is.

    Raises:
        PlanError: it holds more than its request's limit.
    """
    if not fits(plan):
        memory = memory_of(plan)
        raise PlanError(
            f"The given plan holds {memory.peak:,} bytes per rank at {memory.place}, and memory_limit is "
            f"{plan.request.memory_limit:,}. Plan again with this limit, and save the new plan."
        )
    return plan


def fits(plan: PlanData) -> bool:
    """Whether a plan keeps to the memory limit of its request."""
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


def _cut_peaks(plan: PlanData) -> PlanData:
    """Let go of values across every peak above the limit, or down to where nothing more can be let go."""
    limit = plan.request.memory_limit
    assert limit is not None
    costs = _costs_of_a_second_run(plan)
    best, least = plan, memory_of(plan).peak
    for _ in range(_ROUNDS):
        liveness = record(plan.graph, plan.mesh, plan.layout, plan.strategies, plan.request.rules)
        memory = measure(liveness, plan.request.donated, lambda operation: operation.source)
        if memory.peak < least:
            best, least = plan, memory.peak
        if memory.peak <= limit or memory.operation is None:
            break
        # The sort is stable: of equal ones the earliest, which would be held longest.
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


def _costs_of_a_second_run(plan: PlanData) -> dict[Operation, float]:
    """Seconds of each operation that may run again: of its collectives, and of reading and writing memory."""
    comms, zero = account(plan).comms, (0,) * len(plan.mesh.names)

    def nbytes(value: Value) -> int:
        return math.prod(plan.layout(value).shape(zero)) * value.meta.dtype.itemsize

    def seconds(operation: Operation) -> float:
        traffic = sum(map(nbytes, (*operation.operands, *operation.tensors)))
        sent = sum(comm.seconds for comm in comms.get(operation, ()))
        return _LAUNCH + sent + traffic / plan.request.machine.memory_bandwidth

    return {operation: seconds(operation) for operation in plan.graph.operations}


def _enough(found: Sequence[Rematerialization], excess: int, liveness: Liveness) -> list[Rematerialization]:
    """The first of those found that together free `excess` bytes; none is made from what another lets go."""
    chosen: list[Rematerialization] = []
    let_go: set[Buffer] = set()
    kept: set[Buffer] = set()
    for item in found:
        sources = {liveness.buffers[value] for value in item.operation.operands}
        if excess <= 0:
            break
        if item.buffer in kept or sources & let_go:
            continue
        chosen.append(item)
        let_go.add(item.buffer)
        kept |= sources
        excess -= item.freed
    return chosen


def _replace(plan: PlanData, changed: Rewritten) -> PlanData:
    """A plan with other operations, not priced yet."""
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
