"""The strategies of an operation on all mesh axes together, and their time: both from the planner, axis by axis."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from spmd.core.placement import Placement, Replicate
from spmd.ir.graph import Graph, Operation, Value, map_leaves
from spmd.ir.markers import FREE
from spmd.plan.cost.account import send_seconds, sends
from spmd.plan.cost.local_cost import LocalCost
from spmd.plan.data.draft import Draft
from spmd.plan.machine.machine import Machine
from spmd.plan.search.candidates import all_candidates, candidates
from spmd.rules.strategy import Strategy

Choice = tuple[Strategy, ...]
"""The strategy of an operation on each mesh axis, major first."""


def all_choices(draft: Draft, order: Sequence[str]) -> dict[Operation, tuple[Choice, ...]]:
    """The choices of every operation of a draft: on each axis of `order`, strategies that fit those on earlier axes.

    Those of an axis alone have no partial operands that cannot arise. A result without a given spec has more choices
    after an earlier axis than alone: a dim that is made of several is then sharded from its major one on.
    """
    single = [all_candidates(draft, axis) for axis in order]
    found = {}
    for operation in draft.graph.operations:
        whole = all(value in draft.independent for value in operation.tensors)
        choices: list[Choice] = [()]
        for axis, allowed in zip(order, single, strict=True):
            choices = [
                (*before, strategy)
                for before in choices
                for strategy in candidates(*_alone(draft, operation, order, before), axis, whole)
                if operation.op is FREE or strategy in allowed[operation]
            ]
        found[operation] = tuple(choices)
    return found


def choice_seconds(
    machine: Machine, draft: Draft, operation: Operation, order: Sequence[str], choice: Choice, fused: frozenset[Value]
) -> float:
    """Seconds of an operation and of its collectives, as a plan counts them.

    Args:
        machine: the machine.
        draft: the program.
        operation: one of its operations.
        order: the mesh axes, major first.
        choice: the operation's strategy on each axis.
        fused: the values of the program without memory traffic.
    """
    single, alone = _alone(draft, operation, order, choice)
    values = (*alone.operands, *alone.tensors)
    pairs = list(zip((*operation.operands, *operation.tensors), values, strict=True))
    single = attrs.evolve(
        single,
        fused=frozenset(copy for value, copy in pairs if value in fused),
        latency_shares={copy: draft.latency_shares.get(value, 1.0) for value, copy in pairs},
    )
    cost = LocalCost.of(machine, single)
    specs = dict(zip(values, single.pinned.get(alone, ()), strict=False))
    sent = sends(single, specs, alone)
    return cost.planned_seconds(alone) + sum(send_seconds(machine, single, alone, sent))


def _alone(draft: Draft, operation: Operation, order: Sequence[str], choice: Choice) -> tuple[Draft, Operation]:
    """A draft of a single operation, with strategies on the first axes; each operand is a separate value."""

    def copy(leaf: object) -> object:
        return Value(leaf.name, leaf.meta) if isinstance(leaf, Value) else leaf

    args, kwargs = map_leaves(copy, (operation.args, dict(operation.kwargs)))
    alone = attrs.evolve(operation, args=args, kwargs=kwargs)
    values = (*alone.operands, *alone.tensors)
    originals = (*operation.operands, *operation.tensors)
    states: dict[Value, dict[str, Placement]] = {value: {} for value in values}
    for axis, strategy in zip(order, choice, strict=False):
        for value, state in zip(values, (*strategy.operands, *strategy.results), strict=True):
            states[value] |= {} if state == Replicate() else {axis: state}
    single = attrs.evolve(
        draft,
        graph=Graph(alone.operands, (), (alone,), alone.tensors),
        logical={value: draft.logical[original] for value, original in zip(values, originals, strict=True)},
        options={alone: draft.options[operation]} if operation in draft.options else {},
        pinned={alone: draft.pinned[operation]} if operation in draft.pinned else {},
        states=states,
        strategies={alone: dict(zip(order, choice, strict=False))},
    )
    return single, alone
