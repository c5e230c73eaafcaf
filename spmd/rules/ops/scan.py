"""Scans along a dim that may be sharded: each rank scans its shard and adds the totals of the shards before it.

Those from the end of a dim (`spmd.ir.canonical_scans`) add the totals of the shards after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from spmd.collectives import all_gather, axis_index, shard_offset
from spmd.core.placement import Shard, neutral_element
from spmd.ir.call import Call
from spmd.ir.canonical_scans import ADD_AT_EXTREMES, REVERSED
from spmd.rules.builders import along
from spmd.rules.notation import Rows
from spmd.rules.ops.one_dim import resized
from spmd.rules.partial import linear
from spmd.rules.rule import Axes, Body, Row, Rule, table

aten = torch.ops.aten

_FORWARD = {reverse: op for op, reverse in REVERSED.items()}


def _before(totals: Tensor, neutral: complex, axes: Axes, *, after: bool = False) -> Tensor:
    """Every rank's totals in a new first dim, with `neutral` for this rank and those after it, or before it."""
    gathered = all_gather(totals, axes)
    rank = torch.arange(gathered.shape[0], device=totals.device).view(-1, *[1] * totals.ndim)
    counts = rank > axis_index(axes) if after else rank < axis_index(axes)
    return torch.where(counts, gathered, torch.full_like(gathered, neutral))


def _scan(axes: Axes, call: Call, x: Tensor, dim: int, **options: Any) -> Tensor:
    """The scan of this rank's shard, from the end if the operator is."""
    if call.op in REVERSED:
        return call.op(x, dim, **options)  # type: ignore[no-any-return]
    return aten.flip.default(_FORWARD[call.op](aten.flip.default(x, [dim]), dim, **options), [dim])  # type: ignore[no-any-return]


def _cumsum(axes: Axes, call: Call, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scanned = _scan(axes, call, x, dim, dtype=dtype)
    total = x.sum(dim, keepdim=True, dtype=scanned.dtype)
    return scanned + _before(total, 0, axes, after=call.op in _FORWARD).sum(0, dtype=scanned.dtype)


def _cumprod(axes: Axes, call: Call, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scanned = _scan(axes, call, x, dim, dtype=dtype)
    total = x.prod(dim, keepdim=True, dtype=scanned.dtype)
    return scanned * _before(total, 1, axes, after=call.op in _FORWARD).prod(0, dtype=scanned.dtype)


def _logcumsumexp(axes: Axes, call: Call, x: Tensor, dim: int) -> Tensor:
    total = x.logsumexp(dim, keepdim=True)
    before = _before(total, -math.inf, axes, after=call.op in _FORWARD).logsumexp(0)
    return torch.logaddexp(_scan(axes, call, x, dim), before)


@attrs.frozen
class _RunningExtreme:
    """`cummax` or `cummin`: the extreme of the shards before this one wins over less; of equal values the last one."""

    kind: Literal["max", "min"]

    def __call__(self, axes: Axes, call: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        values, places = call.op(x, dim)
        length = x.shape[dim]
        places = places + shard_offset(call.operands[0].shape[dim], axes)
        neutral = neutral_element(self.kind, x.dtype)
        if length:
            last, place = (found.narrow(dim, length - 1, 1) for found in (values, places))
        else:
            shape = resized(x.shape, dim, 1)
            last, place = x.new_full(shape, neutral), places.new_full(shape, -1)
        before, at = _before(last.contiguous(), neutral, axes), _before(place.contiguous(), -1, axes)
        best = before.amax(0) if self.kind == "max" else before.amin(0)
        is_best = (before == best) | ((before != before) & (best != best))
        at = torch.where(is_best, at, torch.full_like(at, -1)).amax(0)
        wins = values >= best if self.kind == "max" else values <= best
        own = (at < 0) | (values != values) | (wins & (best == best))
        return torch.where(own, values, best), torch.where(own, places, at)


def _add_at_extremes(axes: Axes, call: Call, grad: Tensor, dim: int, index: Tensor) -> Tensor:
    """The gradients of elements of a line whose extreme is in a shard before theirs are for one element: sum them."""
    zeros, length = torch.zeros_like(grad), grad.shape[dim]
    if not axes:
        return aten.scatter_add.default(zeros, dim, index, grad)  # type: ignore[no-any-return]
    start = shard_offset(call.operands[0].shape[dim], axes)
    inside = index >= start
    total = torch.where(inside, zeros, grad).sum(dim, keepdim=True, dtype=grad.dtype)
    place = index.narrow(dim, 0, 1) if length else torch.full(total.shape, -1, dtype=index.dtype, device=index.device)
    total, place = (all_gather(x.contiguous(), axes, axis=dim, tiled=True) for x in (total, place))
    if not length:
        return zeros
    index = torch.cat([index, place], dim) - start
    grad = torch.cat([torch.where(inside, grad, zeros), total], dim)
    held = (index >= 0) & (index < length)
    grad, index = (torch.where(held, x, torch.zeros_like(x)) for x in (grad, index))
    return aten.scatter_add.default(zeros, dim, index, grad)  # type: ignore[no-any-return]


def _scanned(body: Body) -> Rows:
    """The strategy that shards the scanned dim of all operands and results; `body` does not support complex numbers."""

    def rows(call: Call) -> Iterator[Row]:
        operand = call.operands[0]
        if operand.ndim and not operand.dtype.is_complex:
            cut = Shard(call.argument("dim") % operand.ndim)
            yield Row((cut,) * len(call.operands), (cut,) * len(call.results), body)

    return rows


def _canonical(*rows: Rows, local: Body) -> Rule:
    """The rule of an operator of canonical programs."""
    return attrs.evolve(along(*rows), local=local)


SCAN = {
    **table({
        "cumsum": along(linear("self"), _scanned(_cumsum)),
        "cumprod": along(_scanned(_cumprod)),
        "logcumsumexp": along(_scanned(_logcumsumexp)),
        "cummax": along(_scanned(_RunningExtreme("max"))),
        "cummin": along(_scanned(_RunningExtreme("min"))),
    }),
    REVERSED[aten.cumsum.default]: _canonical(linear("self"), _scanned(_cumsum), local=_scan),
    REVERSED[aten.cumprod.default]: _canonical(_scanned(_cumprod), local=_scan),
    REVERSED[aten.logcumsumexp.default]: _canonical(_scanned(_logcumsumexp), local=_scan),
    ADD_AT_EXTREMES: _canonical(linear("grad"), _scanned(_add_at_extremes), local=_add_at_extremes),
}  # fmt: skip
"""The rules of scans."""
