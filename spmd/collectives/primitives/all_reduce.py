"""all_reduce: the elementwise reduction of what ranks hold, on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmd.collectives.axis_types import AxisType
from spmd.collectives.primitive import Arguments, Collective, Primitive, Shape
from spmd.collectives.primitives.on_all_ranks import reduced_calls
from spmd.collectives.primitives.ring import gather_ring, scatter_ring
from spmd.collectives.transport.exchange import Exchange, c10d, encoded
from spmd.collectives.transport.group import Group
from spmd.collectives.transport.process_groups import Member
from spmd.collectives.transport.transport_dtypes import reduced
from spmd.core.spec import TensorMeta, chunk_bounds

_I, _V, _U, _R = AxisType.INVARIANT, AxisType.VARYING, AxisType.UNREDUCED, AxisType.REDUCED


def _to_varying(x: Tensor, axes: Sequence[str]) -> Tensor:
    return torch.ops.spmd.pcast(x, _I, _V, axes)  # type: ignore[no-any-return]


def _attained(x: Tensor, result: Tensor, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Where x equals the extremum over all ranks, and on how many ranks it does."""
    mask = x == _to_varying(result, axes)
    count = torch.ops.spmd.all_reduce(mask.to(result.dtype), "sum", axes)
    return mask, count.clamp(min=1)


def _extremum_vjp(g: Tensor, x: Tensor, result: Tensor, op: str, axes: Sequence[str]) -> Tensor:
    mask, count = _attained(x, result, axes)
    return torch.where(mask, _to_varying(g / count, axes), 0)


def _extremum_jvp(t: Tensor, x: Tensor, result: Tensor, op: str, axes: Sequence[str]) -> Tensor:
    mask, count = _attained(x, result, axes)
    return torch.ops.spmd.all_reduce(torch.where(mask, t, 0), "sum", axes) / count


def _most_sent(counts: tuple[int, ...], shape: Shape, *args: Any) -> int:
    """The most elements that a rank sends.

    Rank i sends all blocks but block i in the reduce_scatter, and all but block i + 1 in the all_gather. That is most
    where the two are the smallest blocks, which are the last two.
    """
    numel, ranks = math.prod(shape), math.prod(counts)
    last = [chunk_bounds(numel, (ranks,), (index,)) for index in (ranks - 2, ranks - 1)]
    return 2 * numel - sum(stop - start for start, stop in last)


def _sent(group: Group, calls: Sequence[Arguments], results: Sequence[Tensor]) -> list[int]:
    """A reduce_scatter of flat blocks, then an all_gather."""
    x = calls[0][0]
    bounds = [chunk_bounds(x.numel(), (len(calls),), (index,)) for index in range(len(calls))]
    blocks = [(stop - start) * x.element_size() for start, stop in bounds]
    return [a + b for a, b in zip(scatter_ring(blocks), gather_ring(blocks), strict=True)]


def _run(group: Group, calls: Sequence[Arguments]) -> list[Tensor]:
    return [reduced_calls(calls[0][1], calls)] * len(calls)


def _exchange(member: Member, operand: TensorMeta, op: str) -> Exchange:
    wire, shape = reduced(operand.dtype, op), operand.shape
    sizes = (operand.numel * wire.factor,)
    return Exchange(
        c10d.all_reduce.default,
        (op, member.name),
        encoded(wire),
        lambda buffer: wire.decode(buffer).view(shape),
        sends=sizes,
        receives=sizes,
        in_place=c10d.all_reduce_.default,
    )


ALL_REDUCE = Collective(
    schema="all_reduce(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: _to_varying(g, axes),
    is_linear=lambda op, axes: op == "sum",
    jvp=_extremum_jvp,
    vjp=_extremum_vjp,
    types=lambda *args: {_V: _I},
    arguments=lambda step, shape: (step.op,),
    most_sent=_most_sent,
    sent=_sent,
    ring=lambda ranks, nbytes: 2 * (ranks - 1) * nbytes / ranks,
    buffer=lambda ranks, sent: sent * ranks / max(ranks - 1, 1) / 2,
    run=_run,
    exchange=_exchange,
    alike=lambda op: op,
    reduction=lambda op: op,
    is_invariant=True,
    copies_operand=True,
    example=lambda ranks, count: ((count,), ("sum",)),
)
"""The elementwise reduction (`op`: sum, max or min) of what the ranks hold, on every rank."""

ALL_REDUCE_UNREDUCED = Primitive(
    "all_reduce_unreduced(Tensor x, str op, str[] axes) -> Tensor",
    shape=lambda shape, op, axes: shape,
    transpose=lambda g, shape, op, axes: torch.ops.spmd.pcast(g, _I, _R, axes),
    types=lambda *args: {_U: _I},
    untyped=ALL_REDUCE,
)
"""`all_reduce` by sum of an unreduced value."""
