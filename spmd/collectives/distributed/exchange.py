"""The primitives on torch.distributed: what one rank does, by torch's own functional collectives.

`spmd.collectives.virtual` has the same primitives as functions over all ranks, and is the reference in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from spmd.collectives.local import LOCALS
from spmd.collectives.primitive import Local
from spmd.collectives.primitives import COLLECTIVES, UNTYPED
from spmd.collectives.transport.exchange import Exchange
from spmd.collectives.transport.process_groups import member
from spmd.collectives.transport.ragged_exchange import RaggedExchange
from spmd.core.mesh import Coordinate, Mesh
from spmd.core.spec import TensorMeta
from spmd.job.collective_scope import CollectiveScope


def bind(
    op: torch._ops.OpOverload,
    mesh: Mesh,
    coordinate: Coordinate,
    operand: TensorMeta | None,
    arguments: tuple[Any, ...],
    cause: str = "",
    *,
    communicates: bool = True,
) -> Exchange | RaggedExchange | Local:
    """The function that the rank at `coordinate` runs for one call of a primitive.

    Where the primitive communicates, this is a collective call: process groups are made at their first use. Without
    `communicates` it is none, and the function can pack and unpack only.

    Args:
        op: a primitive, `torch.ops.spmd.<name>.default`.
        mesh: a distributed mesh.
        coordinate: the coordinate of this process's rank.
        operand: local shape and dtype of the operand; None for a primitive without one.
        arguments: the arguments after the tensors.
        cause: why it is called, and where in the user's code, for messages.

    Returns:
        A function of the tensors of the call; an `Exchange` or a `RaggedExchange` if ranks communicate. Both raise a
        SpmdError if a rank is missing.

    Raises:
        SpmdError: a rank is missing when process groups are made.
    """
    op = UNTYPED.get(op, op)
    *rest, axes = arguments
    place = member(mesh, tuple(axes), coordinate, communicates=communicates and op in COLLECTIVES)
    if op in LOCALS:
        operands = [] if operand is None else [operand]
        return LOCALS[op](place.group, place.index, mesh.device, *operands, *rest)
    assert operand is not None
    collective = COLLECTIVES[op]
    if place.group.size == 1:
        return collective.alone(place, *rest)
    what = f"{collective.name} over {', '.join(axes)}{cause and f' ({cause})'}"
    scope = CollectiveScope(what, place.processes, mesh.ranks)
    return attrs.evolve(collective.exchange(place, operand, *rest), scope=scope)


def run(op: torch._ops.OpOverload, mesh: Mesh, coordinate: Coordinate, x: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """Run one primitive on this rank's tensor; a collective call of all ranks of its group."""
    call: Callable[..., Tensor] = bind(op, mesh, coordinate, TensorMeta.of(x), arguments)
    return call(x)
