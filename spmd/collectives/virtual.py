"""The collectives as pure functions over all ranks at once, which the virtual runtime runs.

Each is computed by the `run` of its record (`spmd.collectives.primitives`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.collectives.local import LOCALS, run_local
from spmd.collectives.primitive import Arguments
from spmd.collectives.primitives import COLLECTIVES, UNTYPED
from spmd.collectives.traffic import active_traffic
from spmd.collectives.transport.group import groups
from spmd.core.mesh import Mesh
from spmd.errors import DivergenceError, SpmdError


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
    if op not in COLLECTIVES and op not in LOCALS:
        expected = [op for op in (*COLLECTIVES, *LOCALS) if op not in UNTYPED]
        raise SpmdError(f"{op} is not a primitive. Expected one of {', '.join(map(str, expected))}.")
    arguments = [_positional(op, args, kwargs) if kwargs else tuple(args) for args, kwargs in calls]
    if len(arguments) != mesh.size:
        raise SpmdError(f"{op} needs one call for each of the {mesh.size} ranks of {mesh} (got {len(arguments)}).")
    axes = tuple(arguments[0][-1])
    if any(tuple(rank_arguments[-1]) != axes for rank_arguments in arguments):
        raise DivergenceError(f"{op} runs over different axes on different ranks of {mesh}. Expected {axes} on all.")
    if op in LOCALS:
        return [run_local(op, mesh, rank, *given) for rank, given in enumerate(arguments)]
    collective, traffic = COLLECTIVES[op], active_traffic()
    results: list[Tensor] = [arguments[0][0]] * mesh.size
    sent = [0] * mesh.size
    done: dict[tuple[int, ...], list[Tensor]] = {}  # ranks that make one and the same call share the result
    for group in groups(mesh, axes):
        members = [arguments[rank] for rank in group.ranks]
        same = tuple(id(calls[rank]) for rank in group.ranks)
        if same not in done:
            done[same] = collective.run(group, members)
        outputs = done[same]
        for rank, output in zip(group.ranks, outputs, strict=True):
            results[rank] = output
        if traffic is not None:
            for rank, count in zip(group.ranks, collective.sent(group, members, outputs), strict=True):
                sent[rank] = count
    if traffic is not None:
        traffic.record(collective.kind, axes, sent)
    return results


def _positional(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    rest = op._schema.arguments[len(args) :]
    return (*args, *(kwargs[argument.name] for argument in rest))
