"""The local implementations of rules (`spmd.rules.rule.Body`), called, traced or counted for one operation.

A local implementation is what a rank runs in place of the operator where the operator alone, on local tensors, would
not compute the shard of the result. It may call collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.collectives.environment import axis_environment
from spmd.collectives.precision import reducing_in
from spmd.collectives.primitives import COLLECTIVES
from spmd.core.mesh import Mesh
from spmd.core.placement import Placement
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.ir.comm import Sent
from spmd.ir.graph import Graph, Operation, Value, freeze, iterate_leaves, map_leaves
from spmd.ir.list_schedule import Unit, schedule
from spmd.ir.number import Number
from spmd.ir.simplify import eliminate_dead
from spmd.plan.data.assignment import Assignment
from spmd.plan.data.layout import regroup
from spmd.plan.data.of_program import of_program
from spmd.plan.data.plan import PlanData
from spmd.rules import find_rule
from spmd.rules.nested import combined
from spmd.rules.rule import Body, Rule
from spmd.rules.strategy import Strategy
from spmd.tracing.numbers import traced
from spmd.tracing.running import is_tracing
from spmd.tracing.trace import trace_flat

_OF_THE_RANK = (torch.ops.spmd.axis_index.default, torch.ops.spmd.shard_offset.default)
"""Primitives that take no tensor and return an integer that depends on the rank."""


@attrs.frozen
class _Operand:
    """A tensor argument: its index among the distinct ones, its local meta, and its meta unsharded over the axes.

    The axes are those that the local implementation spans.
    """

    number: int
    local: TensorMeta
    unsharded: TensorMeta


@attrs.frozen
class LocalCall:
    """One call of a local implementation; calls are equal if all that the implementation can observe is equal.

    Its sums over ranks run in `reduce_dtype`, as by `spmd.collectives.precision.summed_in`.
    """

    body: Body
    axes: tuple[str, ...]
    mesh: Mesh
    op: torch._ops.OpOverload
    key: Hashable
    results: tuple[TensorMeta, ...]
    size_argument: int | None
    reduce_dtype: torch.dtype | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = attrs.field(eq=False)

    @classmethod
    def of(
        cls,
        body: Body,
        axes: Sequence[str],
        operation: Operation,
        mesh: Mesh,
        local: Callable[[Value], TensorMeta],
        unsharded: Callable[[Value], TensorMeta],
        *,
        size_argument: int | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> LocalCall:
        """The call of a local implementation for one operation.

        Args:
            body: the local implementation of the operation's strategy.
            axes: the mesh axes that it spans, major first.
            operation: the operation.
            mesh: the mesh.
            local: the meta of the shard of each value.
            unsharded: the meta of each value without sharding over `axes`; the arguments in the implementation's `call`
                have these metas, its results the local ones.
            size_argument: as in `Rule`; the implementation gets the local size there.
            reduce_dtype: as in `Request`.
        """
        numbers = {value: number for number, value in enumerate(dict.fromkeys(operation.operands))}
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = map_leaves(
            lambda leaf: _Operand(numbers[leaf], local(leaf), unsharded(leaf)) if isinstance(leaf, Value) else leaf,
            (operation.args, dict(operation.kwargs)),
        )
        results = tuple(local(value) for value in operation.tensors)
        notes = tuple(leaf.note for leaf in iterate_leaves(arguments) if isinstance(leaf, Number))
        key = freeze(arguments), notes
        return cls(body, tuple(axes), mesh, operation.op, key, results, size_argument, reduce_dtype, arguments)

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Run the local implementation on the distinct local operands, in order of first appearance."""
        args, kwargs = _replace(lambda operand: operand.unsharded, self.arguments)
        call = Call(self.op, args, kwargs, self.results)
        args, kwargs = self.arguments
        if self.size_argument is not None:
            args = with_local_size(args, self.size_argument, self.results[0].shape)
        args, kwargs = _replace(lambda operand: tensors[operand.number], (args, kwargs))
        if is_tracing():
            args, kwargs = map_leaves(traced, (args, kwargs))
        with reducing_in(self.reduce_dtype):
            result = self.body(self.axes, call, *args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def operands(self, device: torch.device | str) -> list[torch.Tensor]:
        """New, uninitialized local operands, in the order that a call takes them."""
        leaves = iterate_leaves(self.arguments)
        metas = {leaf.number: leaf.local for leaf in leaves if isinstance(leaf, _Operand)}
        return [torch.empty(metas[n].shape, dtype=metas[n].dtype, device=device) for n in range(len(metas))]


def trace_local_call(call: LocalCall) -> tuple[Graph, tuple[Value | None, ...]]:
    """A local implementation as a program over the distinct operands, and the values of the operation's results.

    A result that the implementation leaves out is None.
    """
    held: list[bool] = []

    def present(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results = call(*tensors)
        held[:] = [result is not None for result in results]
        return [result for result in results if result is not None]

    with FakeTensorMode():
        operands = call.operands(call.mesh.device)
    with axis_environment(call.mesh.axes):
        graph = eliminate_dead(trace_flat(present, operands))
    values = iter(graph.outputs)
    return graph, tuple(next(values) if has else None for has in held)


@lru_cache(maxsize=4096)
def _sent(use: LocalCall) -> tuple[Sent, ...]:
    with axis_environment(use.mesh.axes), _Collectives(use.mesh) as collectives:
        use(*use.operands("meta"))
    return tuple(collectives.sent)


class _Collectives(TorchDispatchMode):
    """Records the collectives that are called."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in _OF_THE_RANK:
            return torch.empty((), dtype=torch.int64, device="meta")
        result = op(*args, **(kwargs or {}))
        if op in COLLECTIVES:
            collective, (operand, *rest, axes) = COLLECTIVES[op], args
            counts = tuple(map(self.mesh.axis_size, axes))
            sent = collective.most_bytes_sent(counts, tuple(operand.shape), operand.itemsize, rest)
            self.sent.append((collective.kind, tuple(axes), sent))
        return result


def _replace(function: Callable[[_Operand], Any], arguments: Any) -> Any:
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, _Operand) else leaf, arguments)


def with_local_size(args: tuple[Any, ...], position: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An operator's arguments with the size argument at `position` replaced: by `shape`, or its first length."""
    size = list(shape) if isinstance(args[position], (tuple, list)) else shape[0]
    return (*args[:position], size, *args[position + 1 :])


def local_implementation(chosen: Mapping[str, Strategy]) -> tuple[Body, tuple[str, ...]] | None:
    """The local implementation in an operation's strategies and its mesh axes, major first; None if there is none."""
    bodies = {axis: strategy.body for axis, strategy in chosen.items() if strategy.body is not None}
    return (combined(bodies), tuple(bodies)) if bodies else None


def runs_local_implementation(
    operation: Operation, chosen: Mapping[str, Strategy], rules: Mapping[torch._ops.OpOverload, Rule]
) -> bool:
    """Whether some rank runs a local implementation in place of an operation with these strategies.

    Such an operation is not joined with others into a list operator (`_foreach_*`).
    """
    rule = find_rule(operation.op, rules)
    replaced = rule is not None and (rule.empty is not None or rule.local is not None)
    return replaced or local_implementation(chosen) is not None


@of_program
def scheduled(plan: PlanData) -> tuple[Unit, ...]:
    """The calls that a rank makes, in order: those of one list operator (`_foreach_*`) are one call."""
    rules, operations = plan.request.rules, plan.graph.operations
    grouped = (operation for operation in operations if operation.group is not None)
    alone = frozenset(o for o in grouped if runs_local_implementation(o, plan.strategies.get(o, {}), rules))
    return schedule(operations, alone)


def local_collectives(assignment: Assignment, operation: Operation, chosen: Mapping[str, Strategy]) -> tuple[Sent, ...]:
    """The collectives in an operation's local implementation, or the collective that it is.

    Args:
        assignment: the program, and what is decided.
        operation: the operation.
        chosen: its strategies, by mesh axis, in planning order.
    """
    found = local_implementation(chosen)
    if operation.op in COLLECTIVES:
        return (_own(assignment, operation, chosen),)
    if found is None:
        return ()
    body, axes = found
    operation, originals = _apart(operation)
    states = _states(operation, chosen)

    def local(value: Value, without: tuple[str, ...] = ()) -> TensorMeta:
        kept = {axis: state for axis, state in states[value].items() if axis not in without}
        original = originals.get(value, value)
        return TensorMeta(regroup(assignment.sizes_at(original, kept), assignment.logical[original]), value.meta.dtype)

    unsharded = lambda value: local(value, axes)  # noqa: E731
    return _sent(
        LocalCall.of(body, axes, operation, assignment.mesh, local, unsharded, reduce_dtype=assignment.reduce_dtype)
    )


def _own(assignment: Assignment, operation: Operation, chosen: Mapping[str, Strategy]) -> Sent:
    """The collective of a manual region, on the shard of its operand along the automatic axes."""
    value, *rest, axes = operation.args
    sizes = regroup(assignment.sizes_at(value, _states(operation, chosen)[value]), assignment.logical[value])
    counts = tuple(map(assignment.mesh.axis_size, axes))
    collective = COLLECTIVES[operation.op]
    return collective.kind, tuple(axes), collective.most_bytes_sent(counts, sizes, value.meta.dtype.itemsize, rest)


def _apart(operation: Operation) -> tuple[Operation, dict[Value, Value]]:
    """The operation with a value of its own for each operand, whose placements may differ, and the original of each."""
    originals: dict[Value, Value] = {}

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        made = Value(leaf.name, leaf.meta)
        originals[made] = leaf
        return made

    if len(set(operation.operands)) == len(operation.operands):
        return operation, originals
    args, kwargs = map_leaves(twin, (operation.args, dict(operation.kwargs)))
    return attrs.evolve(operation, args=args, kwargs=kwargs), originals


def _states(operation: Operation, chosen: Mapping[str, Strategy]) -> dict[Value, dict[str, Placement]]:
    """The placement of every tensor of an operation on each axis."""
    values = (*operation.operands, *operation.tensors)
    states: dict[Value, dict[str, Placement]] = {value: {} for value in values}
    for axis, strategy in chosen.items():
        for value, state in zip(values, (*strategy.operands, *strategy.results), strict=True):
            states[value][axis] = state
    return states
