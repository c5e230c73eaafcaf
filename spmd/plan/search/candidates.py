"""What each operation may do on the mesh axis that is being planned: its strategies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from spmd.core.placement import REDUCTIONS, Partial, Placement, Replicate, Shard
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import REDISTRIBUTE
from spmd.plan.data.draft import Draft
from spmd.rules.strategy import LOCAL_BODY, Strategy


def all_candidates(draft: Draft, axis: str) -> dict[Operation, tuple[Strategy, ...]]:
    """The strategies of every operation on one mesh axis, given what is decided on the planned ones.

    A strategy that takes partial operands and cuts none is left out where no operand of it can arise partial: making a
    whole value partial only to reduce it later saves nothing. One that cuts others stays: a bias is made partial to be
    added to a product over a sharded dim.

    Operations that are alike, as those of equal layers, get the very same tuple.
    """
    known: dict[Hashable, tuple[tuple[Strategy, ...], tuple[frozenset[Placement], ...]]] = {}
    found: dict[Operation, tuple[Strategy, ...]] = {}
    arising = {value: frozenset([spec.placement(axis)]) for value, spec in draft.given.items()}
    for operation in draft.graph.operations:
        reaching = tuple(arising[operand] for operand in operation.operands)
        whole = all(value in draft.independent for value in operation.tensors)
        key = (_likeness(draft, operation, axis), whole, reaching)
        if key not in known:
            strategies = tuple(
                strategy
                for strategy in candidates(draft, operation, axis, whole)
                if operation in draft.pinned or _partials_arise(strategy, reaching)
            )
            known[key] = strategies, tuple(map(frozenset, zip(*(s.results for s in strategies), strict=True)))
        found[operation], leaving = known[key]
        arising.update(zip(operation.tensors, leaving, strict=False))
    return found


def _likeness(draft: Draft, operation: Operation, axis: str) -> Hashable:
    """What tells apart operations that may do different things on an axis."""
    if operation in draft.pinned:
        source, target = draft.pinned[operation]
        return source.placement(axis), target.placement(axis)
    if operation.op is REDISTRIBUTE:
        (operand,), (result,) = operation.operands, operation.tensors
        states = tuple(tuple(draft.states[value].items()) for value in (operand, result))
        return REDISTRIBUTE, draft.logical[operand], states
    # Equal calls have the same options, and what is decided about their operands and results is in their strategies.
    chosen = tuple(map(id, draft.strategies.get(operation, {}).values()))
    return id(draft.options.get(operation)), chosen, len(operation.operands), len(operation.tensors)


def _partials_arise(strategy: Strategy, arising: Sequence[frozenset[Placement]]) -> bool:
    if any(isinstance(state, Shard) for state in strategy.operands):
        return True
    partial = [index for index, state in enumerate(strategy.operands) if isinstance(state, Partial)]
    return not partial or any(strategy.operands[index] in arising[index] for index in partial)


def candidates(draft: Draft, operation: Operation, axis: str, whole: bool) -> tuple[Strategy, ...]:
    """The strategies of one operation on one mesh axis.

    Args:
        draft: the program.
        operation: one of its operations.
        axis: the axis to plan.
        whole: whether it depends on no input, so that every rank computes it whole.
    """
    if operation in draft.pinned:
        source, target = draft.pinned[operation]
        return (_known((source.placement(axis),), (target.placement(axis),), "given"),)
    if operation.op is REDISTRIBUTE:
        return _pass_through(draft, operation)
    if operation not in draft.options or whole:
        return (_known((Replicate(),) * len(operation.operands), (Replicate(),) * len(operation.tensors), "replicate"),)
    values = (*operation.operands, *operation.tensors)
    found = tuple(
        s
        for s in draft.options[operation]
        if all(_reduces_alike(draft, *pair) for pair in zip(values, _states(s), strict=True))
    )
    chosen = draft.strategies.get(operation, {}).values()
    return tuple(strategy for strategy in found if all(runs_together(strategy, other) for other in chosen))


def runs_together(strategy: Strategy, other: Strategy) -> bool:
    """Whether one body can serve two axes: a written-out row's if both place alike, a factor's wherever it is cut."""
    if strategy.body is None or other.body is None:
        return True
    return strategy == other or (strategy.body is other.body and LOCAL_BODY not in (strategy.label, other.label))


def _states(strategy: Strategy) -> tuple[Placement, ...]:
    return (*strategy.operands, *strategy.results)


def _reduces_alike(draft: Draft, value: Value, state: Placement) -> bool:
    """Whether a value would wait for one kind of reduction on all axes: different kinds do not commute."""
    planned = draft.states.get(value, {}).values()
    return not isinstance(state, Partial) or all(other == state for other in planned if isinstance(other, Partial))


@lru_cache(maxsize=4096)
def _known(operands: tuple[Placement, ...], results: tuple[Placement, ...], label: str) -> Strategy:
    """One object for equal strategies: equal layers are told by identity."""
    return Strategy(operands, results, label=label)


def _pass_through(draft: Draft, operation: Operation) -> tuple[Strategy, ...]:
    """A redistribution on a planned axis, seen from the next axis: one placement before and after.

    The next axis is minor to the planned ones, so it cannot shard a dim that the redistribution cuts or joins.
    """
    (operand,), (result,) = operation.operands, operation.tensors
    before, after = draft.states[operand], draft.states[result]
    moved = [
        state
        for axis in draft.mesh.names
        for state, other in ((before.get(axis), after.get(axis)), (after.get(axis), before.get(axis)))
        if state != other
    ]
    cut = {state.dim for state in moved if isinstance(state, Shard)}
    reduced = {state.op for state in moved if isinstance(state, Partial)}
    kept: list[Placement] = [Replicate()]
    kept += [Shard(dim) for dim, size in enumerate(draft.local_sizes(operand)) if dim not in cut and size > 1]
    kept += [Partial(op) for op in REDUCTIONS if reduced <= {op} and _reduces_alike(draft, operand, Partial(op))]
    return tuple(_known((state,), (state,), str(state)) for state in kept)
