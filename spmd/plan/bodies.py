"""Local bodies of rules, traced into the operators that one rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from spmd.collectives.environment import axis_environment
from spmd.collectives.traffic import StepKind, ring_bytes
from spmd.graph import Operation, Value, map_leaves
from spmd.mesh import Mesh
from spmd.placement import Placement
from spmd.plan.draft import Draft
from spmd.plan.layout import regroup
from spmd.rules.rule import Body
from spmd.rules.strategy import Strategy
from spmd.spec import TensorMeta

_COLLECTIVES: Mapping[Any, StepKind] = {
    getattr(torch.ops.spmd, kind.value).default: kind for kind in StepKind if kind.is_collective
}


def trace_body(
    body: Body,
    axes: Sequence[str],
    operation: Operation,
    mesh: Mesh,
    local: Callable[[Value], TensorMeta],
    unsharded: Callable[[Value], TensorMeta],
    size_argument: int | None = None,
) -> fx.GraphModule:
    """What one rank computes for `operation`, as a graph over its distinct operands in order of first appearance.

    Args:
        body: the body of the operation's strategy.
        axes: the mesh axes that it spans, major first.
        operation: the call.
        mesh: the mesh.
        local: the meta of the shard of each value.
        unsharded: the meta of each value with the body's axes not sharded, which the body sees in its `call`; of the
            results it sees the local metas.
        size_argument: as in `Rule`; the body gets the local size.
    """
    operands = tuple(dict.fromkeys(operation.operands))
    results = tuple(local(value) for value in operation.tensors)
    call = attrs.evolve(operation.call(unsharded), results=results)
    args = operation.args
    if size_argument is not None:
        args = with_local_size(args, size_argument, local(operation.tensors[0]).shape)

    def run(*tensors: torch.Tensor) -> Any:
        given = dict(zip(operands, tensors, strict=True))
        replace = lambda leaf: given[leaf] if isinstance(leaf, Value) else leaf  # noqa: E731
        kwargs = map_leaves(replace, dict(operation.kwargs))
        result = body(tuple(axes), call, *map_leaves(replace, args), **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    with FakeTensorMode() as mode, axis_environment(mesh.axes):
        metas = [local(value) for value in operands]
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=mesh.device) for meta in metas]
        del mode
        return make_fx(run, tracing_mode="real")(*tensors)


def with_local_size(args: tuple[Any, ...], position: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An operator's arguments with the one that repeats the result's shape, or its first length, replaced."""
    size = list(shape) if isinstance(args[position], (tuple, list)) else shape[0]
    return (*args[:position], size, *args[position + 1 :])


def body_of(chosen: Mapping[str, Strategy]) -> tuple[Body, tuple[str, ...]] | None:
    """The local body among an operation's strategies and the mesh axes that it spans, major first; None without one."""
    axes = tuple(axis for axis, strategy in chosen.items() if strategy.body is not None)
    if not axes:
        return None
    body = chosen[axes[0]].body
    assert body is not None
    return body, axes


def body_collectives(
    draft: Draft, operation: Operation, chosen: Mapping[str, Strategy]
) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    """The kind, the mesh axes and the bytes sent per rank of every collective in an operation's local body.

    Args:
        draft: the program.
        operation: the operation.
        chosen: its strategies, by mesh axis, in the order of planning.
    """
    found = body_of(chosen)
    if found is None:
        return ()
    body, axes = found
    states = _states(operation, chosen)

    def local(value: Value, without: tuple[str, ...] = ()) -> TensorMeta:
        kept = {axis: state for axis, state in states[value].items() if axis not in without}
        return TensorMeta(regroup(draft.sizes_at(value, kept), draft.logical[value]), value.meta.dtype)

    unsharded = lambda value: local(value, axes)  # noqa: E731
    signature = f"{operation.call(local)} {operation.call(unsharded)}"
    return _traced_collectives(_BodyCall(body, axes, draft.mesh, signature, operation, local, unsharded))


@attrs.frozen
class _BodyCall:
    """One use of a body; equal uses, by their `signature`, share one trace."""

    body: Body
    axes: tuple[str, ...]
    mesh: Mesh
    signature: str
    operation: Operation = attrs.field(eq=False)
    local: Callable[[Value], TensorMeta] = attrs.field(eq=False)
    unsharded: Callable[[Value], TensorMeta] = attrs.field(eq=False)


@lru_cache(maxsize=256)
def _traced_collectives(use: _BodyCall) -> tuple[tuple[str, tuple[str, ...], float], ...]:
    module = trace_body(use.body, use.axes, use.operation, use.mesh, use.local, use.unsharded)
    found = []
    for node in module.graph.nodes:
        kind = _COLLECTIVES.get(node.target) if node.op == "call_function" else None
        if kind is not None:
            spanned = tuple(node.args[-1])
            moved = node if kind is StepKind.ALL_GATHER else node.args[0]
            size = TensorMeta.of(moved.meta["val"]).nbytes
            found.append((kind.value, spanned, ring_bytes(kind, use.mesh.axis_size(spanned), size)))
    return tuple(found)


def _states(operation: Operation, chosen: Mapping[str, Strategy]) -> dict[Value, dict[str, Placement]]:
    """The placement of every tensor of an operation on each axis."""
    values = (*operation.operands, *operation.tensors)
    states: dict[Value, dict[str, Placement]] = {value: {} for value in values}
    for axis, strategy in chosen.items():
        for value, state in zip(values, (*strategy.operands, *strategy.results), strict=True):
            states[value][axis] = state
    return states
