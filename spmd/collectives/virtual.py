"""The collectives as pure functions over all ranks at once, which the virtual runtime runs.

Reductions run in rank order, so results are deterministic. Tensors are read-only, because ranks may share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from spmd.collectives.local import LOCALS, run_local
from spmd.collectives.primitives import COLLECTIVES, RAGGED_ALL_TO_ALL, UNTYPED
from spmd.collectives.traffic import active_traffic, sent_bytes
from spmd.collectives.transport.group import Group, groups
from spmd.collectives.transport.routes import Routes, exchange_rows
from spmd.core.mesh import Mesh
from spmd.errors import DivergenceError, SpmdError

Arguments: TypeAlias = tuple[Any, ...]


_COMBINE: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
)


def _reduce(op: str, tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].contiguous()
    combine = _COMBINE[op]
    total = combine(tensors[0], tensors[1])
    for tensor in tensors[2:]:
        combine(total, tensor, out=total)
    return total.contiguous()


def _equal_shapes(calls: Sequence[Arguments]) -> list[Tensor]:
    """The tensors of the calls; a DivergenceError if their shapes differ, because torch would broadcast them."""
    tensors = [arguments[0] for arguments in calls]
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) != 1:
        raise DivergenceError(
            f"Ranks hold different shapes in one collective: {sorted(map(tuple, shapes))}. Expected equal ones."
        )
    return tensors


def _cut(group: Group, whole: Tensor, dim: int) -> list[Tensor]:
    """The chunk of `dim` for every rank of the group; a view if that is contiguous."""
    return [piece.contiguous() for piece in whole.split(group.lengths(whole.shape[dim]), dim)]


def _all_reduce(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    return [_reduce(calls[0][1], _equal_shapes(calls))] * len(calls)


def _all_gather(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, dim, size, _ = calls[0]
    tensors = [arguments[0] for arguments in calls]
    found = [tensor.shape[dim] for tensor in tensors]
    if found != group.lengths(size):
        raise DivergenceError(f"all_gather: ranks hold {found} of dim {dim}, not the chunks of its length {size}.")
    return [torch.cat(tensors, dim).contiguous()] * len(calls)


def _reduce_scatter(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, op, dim, _, _ = calls[0]
    return _cut(group, _reduce(op, _equal_shapes(calls)), dim)


def _all_to_all(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, split_dim, concat_dim, *_ = calls[0]
    # Concatenated and then split, which copies twice, but with n operators for n ranks instead of n * n.
    return _cut(group, torch.cat([arguments[0] for arguments in calls], concat_dim), split_dim)


def _permute(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    results = []
    for index, (x, sources, shape, _) in enumerate(calls):
        source = sources[index]
        results.append(calls[source][0].contiguous() if source >= 0 else x.new_zeros(shape))
    return results


def _ragged_all_to_all(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    _, table, _, transposed, _ = calls[0]
    routes = Routes.read(table, transposed, group.ranks)
    return exchange_rows(routes, [arguments[0] for arguments in calls], [arguments[2] for arguments in calls])


KERNELS: Mapping[torch._ops.OpOverload, Callable[[Group, Sequence[Arguments]], list[Tensor]]] = MappingProxyType(
    {
        torch.ops.spmd.all_reduce.default: _all_reduce,
        torch.ops.spmd.all_gather.default: _all_gather,
        torch.ops.spmd.reduce_scatter.default: _reduce_scatter,
        torch.ops.spmd.all_to_all.default: _all_to_all,
        torch.ops.spmd.permute.default: _permute,
        RAGGED_ALL_TO_ALL.op: _ragged_all_to_all,
    }
)
"""For each collective, the function from the arguments of all ranks of a group to their results, in group order."""


def run(op: torch._ops.OpOverload, mesh: Mesh, calls: Sequence[tuple[Arguments, Mapping[str, Any]]]) -> list[Tensor]:
    """Run one primitive on every rank of a mesh.

    Args:
        op: a primitive, `torch.ops.spmd.<name>.default`.
        mesh: the mesh.
        calls: the arguments and keyword arguments of each rank's call, in rank order.

    Returns:
        Each rank's result, in rank order; contiguous, read-only, possibly one tensor on several ranks.

    Raises:
        SpmdError: an operator that is no primitive.
        DivergenceError: ranks with different axes, or shapes that do not fit together.

    >>> from spmd.core.mesh import make_mesh
    >>> mesh = make_mesh({"data": 2}, runtime="virtual")
    >>> run(torch.ops.spmd.all_reduce.default, mesh, [((torch.tensor(x), "sum", ["data"]), {}) for x in (1, 2)])
    [tensor(3), tensor(3)]
    """
    op = UNTYPED.get(op, op)
    if op not in KERNELS and op not in LOCALS:
        raise SpmdError(f"{op} is not a primitive. Expected one of {', '.join(map(str, (*KERNELS, *LOCALS)))}.")
    arguments = [_positional(op, args, kwargs) if kwargs else tuple(args) for args, kwargs in calls]
    if len(arguments) != mesh.size:
        raise SpmdError(f"{op} needs one call for each of the {mesh.size} ranks of {mesh} (got {len(arguments)}).")
    axes = tuple(arguments[0][-1])
    if any(tuple(rank_arguments[-1]) != axes for rank_arguments in arguments):
        raise DivergenceError(f"{op} runs over different axes on different ranks of {mesh}. Expected {axes} on all.")
    if op in LOCALS:
        return [run_local(op, mesh, rank, *given) for rank, given in enumerate(arguments)]
    kernel, traffic = KERNELS[op], active_traffic()
    results: list[Tensor] = [arguments[0][0]] * mesh.size
    sent = [0] * mesh.size
    done: dict[tuple[int, ...], list[Tensor]] = {}  # ranks that make one and the same call share the result
    for group in groups(mesh, axes):
        members = [arguments[rank] for rank in group.ranks]
        same = tuple(id(calls[rank]) for rank in group.ranks)
        if same not in done:
            done[same] = kernel(group, members)
        outputs = done[same]
        for rank, output in zip(group.ranks, outputs, strict=True):
            results[rank] = output
        if traffic is not None:
            for rank, count in zip(group.ranks, _sent(op, group, members, outputs), strict=True):
                sent[rank] = count
    if traffic is not None:
        traffic.record(COLLECTIVES[op], axes, sent)
    return results


def _sent(op: Any, group: Group, calls: Sequence[Arguments], results: Sequence[Tensor]) -> list[int]:
    """The bytes that each rank of a group has sent."""
    if op is not RAGGED_ALL_TO_ALL.op:
        return sent_bytes(COLLECTIVES[op], calls, results)
    routes = Routes.read(calls[0][1], calls[0][3], group.ranks)
    rows = [arguments[0][:1].nbytes for arguments in calls]
    return [routes.sent(index) * nbytes for index, nbytes in enumerate(rows)]


def _positional(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    rest = op._schema.arguments[len(args) :]
    return (*args, *(kwargs[argument.name] for argument in rest))
