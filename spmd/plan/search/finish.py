"""From a complete draft to the finished plan: its specs, its collectives with their causes, and its predicted time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from spmd.collectives.manual import ENTER, LEAVE
from spmd.core.spec import DTensorSpec
from spmd.ir.graph import Graph, Operation, Value
from spmd.ir.markers import DRAFT_MARKERS, FREE, RELABEL
from spmd.plan.cost.account import account
from spmd.plan.data.assignment import flat_shape
from spmd.plan.data.draft import Draft, physical_shape
from spmd.plan.data.plan import PlanData
from spmd.plan.data.request import Request
from spmd.plan.search.boundary import expressed
from spmd.plan.search.defer import defer_numbers
from spmd.plan.search.hoist import hoist_sent
from spmd.plan.search.join import join_redistributions
from spmd.plan.search.slices import slice_early


def finish(draft: Draft, request: Request, joins: bool = True) -> PlanData:
    """The plan of a draft in which all mesh axes are planned; with `joins`, two redistributions in a row become one."""
    draft = _with_free_outputs(draft)
    specs = draft.specs()
    graph, kept, pinned = _without_noop_markers(draft.graph, draft, specs)
    if joins:
        graph = join_redistributions(graph, specs, pinned, draft.latency_shares, request)
    graph = hoist_sent(defer_numbers(graph))
    graph = slice_early(graph, specs)
    strategies = {
        kept[operation]: MappingProxyType(dict(chosen))
        for operation, chosen in draft.strategies.items()
        if operation in kept
    }
    known = {*DRAFT_MARKERS, ENTER, LEAVE}
    fallbacks = (kept[o] for o in draft.graph.operations if o.op not in known and o not in draft.options)
    plan = PlanData(
        request=request,
        mesh=draft.mesh,
        graph=graph,
        logical=MappingProxyType(dict(draft.logical)),
        specs=MappingProxyType(specs),
        strategies=MappingProxyType(strategies),
        fallbacks=tuple(fallbacks),
        gap=draft.gap,
        seconds=0.0,
        comms=(),
        schedule=request.machine.launch_schedule,
    )
    found = account(plan)
    return attrs.evolve(plan, comms=found.all_comms, seconds=found.total)


def _with_free_outputs(draft: Draft) -> Draft:
    """The draft in which outputs without a given spec have, over their physical dims, the one that was chosen."""
    replaced: dict[Operation, Operation] = {}
    logical, pinned = dict(draft.logical), dict(draft.pinned)
    for operation in draft.graph.operations:
        if operation.op is FREE:
            (value,), (result,) = operation.operands, operation.tensors
            chosen = draft.spec(result)
            physical = expressed(chosen, value.meta, logical[value], draft.planned)
            assert physical is not None, "candidates of a free output are specs that a P expresses"
            replaced[operation] = relabel = attrs.evolve(operation, op=RELABEL)
            logical[result], pinned[relabel] = physical_shape(value.meta), (chosen, physical)
    operations = tuple(replaced.get(operation, operation) for operation in draft.graph.operations)
    graph = attrs.evolve(draft.graph, operations=operations)
    return attrs.evolve(draft, graph=graph, logical=logical, pinned=pinned) if replaced else draft


def _without_noop_markers(
    graph: Graph, draft: Draft, specs: Mapping[Value, DTensorSpec]
) -> tuple[Graph, dict[Operation, Operation], frozenset[Value]]:
    """The program without markers that change nothing, a map from other operations to their replacements, and the
    values whose specs are given.
    """
    same: dict[Value, Value] = {}
    kept: dict[Operation, Operation] = {}
    pinned: set[Value] = set()
    for operation in graph.operations:
        placed = operation.substitute(same)
        pinned.update(placed.operands if operation in draft.pinned else ())
        if operation.op in DRAFT_MARKERS and _changes_nothing(placed, draft, specs):
            same[operation.tensors[0]] = placed.operands[0]
        else:
            kept[operation] = placed
    outputs = tuple(same.get(value, value) for value in graph.outputs)
    return attrs.evolve(graph, operations=tuple(kept.values()), outputs=outputs), kept, frozenset(pinned)


def _changes_nothing(operation: Operation, draft: Draft, specs: Mapping[Value, DTensorSpec]) -> bool:
    (operand,), (result,) = operation.operands, operation.tensors
    same_dims = flat_shape(draft.logical[operand]) == flat_shape(draft.logical[result])
    return same_dims and specs[operand] == specs[result]
