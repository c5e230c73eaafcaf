"""The candidate strategies of each operation on the mesh axis that is being planned."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache

from spmd.collectives.manual import ENTER, LEAVE, ManualAxes, region_axes
from spmd.core.placement import REDUCTIONS, Partial, Placement, Replicate, Shard
from spmd.ir.graph import Operation, Value
from spmd.ir.markers import FREE, REDISTRIBUTE
from spmd.ir.regions import CARRY
from spmd.plan.data.draft import Draft, logical_meta, spec_of
from spmd.plan.search.boundary import expressed
from spmd.rules.nested import combine
from spmd.rules.strategy import LOCAL_BODY, MANUAL, Strategy


def all_candidates(draft: Draft, axis: str) -> dict[Operation, tuple[Strategy, ...]]:
    """The strategies of every operation on one mesh axis, given the decisions on the planned axes.

    A strategy with partial operands and no sharded ones is left out if none of these operands can be produced partial:
    resharding a replicated value to partial only to reduce it later saves nothing. With sharded operands it stays: a
    bias becomes partial to be added to a product over a sharded dim.

    Identical operations, as those of identical layers, share one tuple object.
    """
    known: dict[Hashable, tuple[tuple[Strategy, ...], tuple[frozenset[Placement], ...]]] = {}
    found: dict[Operation, tuple[Strategy, ...]] = {}
    arising = {value: frozenset([spec.placement(axis)]) for value, spec in draft.given.items()}
    manual = ManualAxes()
    for operation in draft.graph.operations:
        reaching = tuple(arising[operand] for operand in operation.operands)
        whole = all(value in draft.independent for value in operation.tensors)
        as_is = _runs_as_it_is(manual.add(operation), axis, draft)
        key = (_cache_key(draft, operation, axis), whole, as_is, reaching)
        if key not in known:
            strategies = tuple(
                strategy
                for strategy in candidates(draft, operation, axis, whole, as_is)
                if operation in draft.pinned
                or _is_end(operation, axis)
                or operation.op is CARRY  # what the next trips carry may be partial
                or _partials_arise(strategy, reaching)
            )
            known[key] = strategies, tuple(map(frozenset, zip(*(s.results for s in strategies), strict=True)))
        found[operation], leaving = known[key]
        arising.update(zip(operation.tensors, leaving, strict=False))
    return found


def _cache_key(draft: Draft, operation: Operation, axis: str) -> Hashable:
    """A cache key: operations with equal keys have the same candidates on an axis, apart from what operands allow."""
    if operation in draft.pinned:
        source, target = draft.pinned[operation]
        return source.placement(axis), target.placement(axis)
    if _is_end(operation, axis):
        return operation.op, draft.ends[operation.tensors[0]].placement(axis)
    if operation.op is REDISTRIBUTE:
        (operand,), (result,) = operation.operands, operation.tensors
        states = tuple(tuple(draft.states[value].items()) for value in (operand, result))
        return REDISTRIBUTE, draft.logical[operand], states
    if operation.op is FREE:
        (operand,) = operation.operands
        return FREE, operand.meta, draft.logical[operand], tuple(draft.states.get(operand, {}).items())
    # Identical calls share one options object; the placements of their tensors follow from their strategies.
    chosen = tuple(map(id, draft.strategies.get(operation, {}).values()))
    return id(draft.options.get(operation)), chosen, len(operation.operands), len(operation.tensors)


def _partials_arise(strategy: Strategy, arising: Sequence[frozenset[Placement]]) -> bool:
    if any(isinstance(state, Shard) for state in strategy.operands):
        return True
    partial = [index for index, state in enumerate(strategy.operands) if isinstance(state, Partial)]
    return not partial or any(strategy.operands[index] in arising[index] for index in partial)


def candidates(draft: Draft, operation: Operation, axis: str, whole: bool, as_is: bool = False) -> tuple[Strategy, ...]:
    """The strategies of one operation on one mesh axis.

    Args:
        draft: the program.
        operation: one of its operations.
        axis: the axis to plan.
        whole: whether it depends on no input; then it may only be replicated.
        as_is: whether it is in a region that is manual along the axis; then its tensors are what one rank holds.
    """
    if operation in draft.pinned:
        source, target = draft.pinned[operation]
        return (_known((source.placement(axis),), (target.placement(axis),), "given"),)
    if _is_end(operation, axis):
        outside, inside = (draft.ends[operation.tensors[0]].placement(axis),), (Replicate(),)
        return (_known(*((outside, inside) if operation.op is ENTER else (inside, outside)), "given"),)
    if as_is:
        return (_known((Replicate(),) * len(operation.operands), (Replicate(),) * len(operation.tensors), MANUAL),)
    if operation.op is REDISTRIBUTE and not whole:
        return _pass_through(draft, operation)
    if operation.op is FREE and not whole:
        return _free(draft, operation, axis)
    if operation not in draft.options or whole:
        return (_known((Replicate(),) * len(operation.operands), (Replicate(),) * len(operation.tensors), "replicate"),)
    values = (*operation.operands, *operation.tensors)
    found = tuple(
        s
        for s in draft.options[operation]
        if all(_has_same_reduction(draft, *pair) for pair in zip(values, _states(s), strict=True))
    )
    chosen = draft.strategies.get(operation, {}).values()
    return tuple(strategy for strategy in found if all(runs_together(strategy, other) for other in chosen))


def _runs_as_it_is(manual: frozenset[str], axis: str, draft: Draft) -> bool:
    """Whether an operation with these manual axes is not sharded along an axis.

    In regions where shapes differ between ranks, nothing is sharded along automatic axes: ranks may have other
    operators there.
    """
    return axis in manual or (bool(manual) and draft.graph.variants is not None)


def _is_end(operation: Operation, axis: str) -> bool:
    """Whether an operation enters or leaves a region that is manual along an axis."""
    return operation.op in (ENTER, LEAVE) and axis in region_axes(operation)


def runs_together(strategy: Strategy, other: Strategy) -> bool:
    """Whether two strategies of one operation can be combined on two mesh axes, given their local implementations.

    A local implementation from a row of the rule requires the same strategy on both axes, or one along another dim
    (`Along`). One from a factor works for whichever of the factor's atoms are sharded.
    """
    if strategy.body is None or other.body is None or combine(strategy.body, other.body):
        return True
    return strategy == other or (strategy.body is other.body and LOCAL_BODY not in (strategy.label, other.label))


def _states(strategy: Strategy) -> tuple[Placement, ...]:
    return (*strategy.operands, *strategy.results)


def _has_same_reduction(draft: Draft, value: Value, state: Placement) -> bool:
    """Whether a value with placement `state` would have one partial reduction on all axes: others do not commute."""
    planned = draft.states.get(value, {}).values()
    return not isinstance(state, Partial) or all(other == state for other in planned if isinstance(other, Partial))


@lru_cache(maxsize=4096)
def _known(operands: tuple[Placement, ...], results: tuple[Placement, ...], label: str) -> Strategy:
    """A strategy, one object for equal ones: identical layers are recognised by identity."""
    return Strategy(operands, results, label=label)


def _pass_through(draft: Draft, operation: Operation) -> tuple[Strategy, ...]:
    """The strategies of a redistribution of a planned axis on another axis: the same placement before and after.

    The other axis is minor to the planned ones, so it cannot shard a dim that the redistribution splits or gathers.
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
    kept += [Partial(op) for op in REDUCTIONS if reduced <= {op} and _has_same_reduction(draft, operand, Partial(op))]
    return tuple(_known((state,), (state,), str(state)) for state in kept)


def _free(draft: Draft, operation: Operation, axis: str) -> tuple[Strategy, ...]:
    """The strategies of an output without a given spec: replicated, or any dim sharded so that a `P` expresses it."""
    (value,) = operation.operands
    logical, planned = draft.logical[value], draft.states.get(value, {})
    meta = logical_meta(value.meta, logical)
    kept: list[Placement] = [Replicate()]
    for dim, size in enumerate(draft.local_sizes(value)):
        spec = spec_of(draft.mesh, {**planned, axis: Shard(dim)}, meta)
        if size > 1 and expressed(spec, value.meta, logical, (*planned, axis)) is not None:
            kept.append(Shard(dim))
    return tuple(_known((state,), (state,), str(state)) for state in kept)
