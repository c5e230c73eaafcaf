"""From a complete draft to the frozen plan: its specs, its collectives with their causes, and its predicted time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import attrs

from spmd.collectives.redistribute import redistribution
from spmd.graph import Graph, Operation, Value, map_leaves
from spmd.plan.bodies import body_collectives
from spmd.plan.cost import LocalCost
from spmd.plan.draft import Draft, flat_shape
from spmd.plan.machine import Machine
from spmd.plan.markers import PIN, REDISTRIBUTE, RELABEL
from spmd.plan.plan import Comm, Plan
from spmd.rules.strategy import Strategy
from spmd.spec import DTensorSpec

_MARKERS = (PIN, REDISTRIBUTE, RELABEL)


def finish(draft: Draft, machine: Machine) -> Plan:
    """The plan that a draft with all axes planned describes."""
    specs = _specs(draft)
    graph, kept = _without_pins(draft.graph, draft, specs)
    causes = {kept[operation]: cause for operation, cause in draft.causes.items() if operation in kept}
    strategies = {
        kept[operation]: MappingProxyType(dict(chosen))
        for operation, chosen in draft.strategies.items()
        if operation in kept
    }
    comms = tuple(_comms(graph, draft, specs, strategies, causes, machine))
    cost = LocalCost.of(machine, draft)
    local = sum(cost.planned_seconds(operation) for operation in draft.graph.operations)
    return Plan(
        mesh=draft.mesh,
        graph=graph,
        logical=MappingProxyType(dict(draft.logical)),
        specs=MappingProxyType(specs),
        strategies=MappingProxyType(strategies),
        fallbacks=tuple(
            kept[operation]
            for operation in draft.graph.operations
            if operation.op not in _MARKERS and operation not in draft.options
        ),
        seconds=local + sum(comm.seconds for comm in comms),
        comms=comms,
    )


def _specs(draft: Draft) -> dict[Value, DTensorSpec]:
    """The spec of every value; where one was given, that one, since it knows the order of shards."""
    specs = dict(draft.placed)
    for operation in draft.graph.operations:
        for value in operation.tensors:
            fixed = draft.fixed.get(operation)
            specs[value] = fixed[1] if fixed else draft.spec(value)
    return specs


def _without_pins(
    graph: Graph, draft: Draft, specs: Mapping[Value, DTensorSpec]
) -> tuple[Graph, dict[Operation, Operation]]:
    """The program without operations that change nothing, and what became of the others."""
    same: dict[Value, Value] = {}
    kept: dict[Operation, Operation] = {}

    def resolve(leaf: object) -> object:
        return same.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    for operation in graph.operations:
        placed = attrs.evolve(
            operation, args=map_leaves(resolve, operation.args), kwargs=map_leaves(resolve, dict(operation.kwargs))
        )
        if operation.op in _MARKERS and _changes_nothing(placed, draft, specs):
            same[operation.tensors[0]] = placed.operands[0]
        else:
            kept[operation] = placed
    outputs = tuple(same.get(value, value) for value in graph.outputs)
    return attrs.evolve(graph, operations=tuple(kept.values()), outputs=outputs).verify(), kept


def _changes_nothing(operation: Operation, draft: Draft, specs: Mapping[Value, DTensorSpec]) -> bool:
    (operand,), (result,) = operation.operands, operation.tensors
    same_dims = flat_shape(draft.logical[operand]) == flat_shape(draft.logical[result])
    return same_dims and specs[operand] == specs[result]


def _comms(
    graph: Graph,
    draft: Draft,
    specs: Mapping[Value, DTensorSpec],
    strategies: Mapping[Operation, Mapping[str, Strategy]],
    causes: Mapping[Operation, Operation],
    machine: Machine,
) -> Iterator[Comm]:
    producers = {value: operation for operation in graph.operations for value in operation.tensors}
    for operation in graph.operations:
        if operation.op is REDISTRIBUTE:
            (operand,), (result,) = operation.operands, operation.tensors
            cause = _cause(operand, specs[result], specs[operand], producers, causes.get(operation))
            for step in redistribution(specs[operand], specs[result]):
                if step.is_collective:
                    seconds = machine.collective_seconds(step.axes, step.bytes)
                    yield Comm(step.kind.value, step.axes, step.bytes, seconds, cause, operation.source)
            continue
        for kind, axes, sent in body_collectives(draft, operation, strategies.get(operation, {})):
            cause = f"{_name(operation)} over a sharded dim"
            yield Comm(kind, axes, sent, machine.collective_seconds(axes, sent), cause, operation.source)


def _name(operation: Operation) -> str:
    return operation.op.overloadpacket.__name__


def _cause(
    operand: Value,
    wanted: DTensorSpec,
    held: DTensorSpec,
    producers: Mapping[Value, Operation],
    user: Operation | None,
) -> str:
    producer = producers.get(operand)
    origin = f"input {operand.name}" if producer is None else _name(producer)
    taker = "the boundary" if user is None else "the result" if user.op is PIN else _name(user)
    return f"{origin} gives {held.pspec!r}, {taker} wants {wanted.pspec!r}"
