"""Scans along a dim that may be sharded: each rank scans its shard and adds the totals of the shards before it.

Those from the end of a dim (`spmd.ir.canonical_scans`) add the totals of the shards after it. All ranks get all totals
where these are few; where there are many lines, each rank adds up those of some lines, for all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from spmd.collectives import all_gather, all_to_all, axis_index, axis_size, shard_offset
from spmd.core.placement import Shard, neutral_element
from spmd.ir.call import Call
from spmd.ir.canonical_scans import ADD_AT_EXTREMES, REVERSED
from spmd.rules.builders import along
from spmd.rules.notation import Rows
from spmd.rules.ops.one_dim import padded, resized
from spmd.rules.partial import linear
from spmd.rules.rule import Axes, Body, Row, Rule, table

aten = torch.ops.aten

_FORWARD = {reverse: op for op, reverse in REVERSED.items()}


_FEW_BYTES = 65536
"""The most bytes that are sent in one collective where two would send fewer: time is latency there."""


def _before(
    axes: Axes, call: Call, totals: Sequence[Tensor], neutral: Sequence[complex], combine: Callable[..., Any]
) -> list[Tensor]:
    """What the totals of the shards before this rank's combine to; of those after it, if the scan is from the end.

    Args:
        totals: this rank's.
        neutral: stands in each for ranks that do not count.
        combine: combines all ranks' totals, which are along the first dim.
    """
    whole, ranks = call.operands[0], axis_size(axes)
    lines = whole.numel // max(whole.shape[call.argument("dim")], 1)
    numbers = torch.arange(ranks, device=totals[0].device)

    def combined(every: Sequence[Tensor], here: Tensor) -> list[Tensor]:
        other = numbers.view(-1, *[1] * (every[0].ndim - 1))
        counts = other > here if call.op in _FORWARD else other < here
        found = combine(*(torch.where(counts, x, torch.full_like(x, n)) for x, n in zip(every, neutral, strict=True)))
        return list(found) if isinstance(found, tuple) else [found]

    # Decided by global lengths: ranks with fewer lines run the same collectives.
    if (ranks - 1) * lines * max(x.dtype.itemsize for x in totals) <= _FEW_BYTES:
        return combined([all_gather(x.contiguous(), axes) for x in totals], axis_index(axes).to(numbers.device))
    size = totals[0].numel()
    parts = [padded(x.reshape(-1), 0, 0, -size % ranks).view(ranks, -1) for x in totals]
    every = [all_to_all(x, axes, 0, 0, tiled=True).unsqueeze(1) for x in parts]
    found = [all_to_all(x.contiguous(), axes, 0, 0, tiled=True) for x in combined(every, numbers.view(-1, 1))]
    return [x.reshape(-1).narrow(0, 0, size).view(totals[0].shape) for x in found]


def _scan(axes: Axes, call: Call, x: Tensor, dim: int, **options: Any) -> Tensor:
    """The scan of this rank's shard, from the end if the operator is."""
    if call.op in REVERSED:
        return call.op(x, dim, **options)  # type: ignore[no-any-return]
    return aten.flip.default(_FORWARD[call.op](aten.flip.default(x, [dim]), dim, **options), [dim])  # type: ignore[no-any-return]


def _cumsum(axes: Axes, call: Call, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scanned = _scan(axes, call, x, dim, dtype=dtype)
    total = x.sum(dim, keepdim=True, dtype=scanned.dtype)
    (before,) = _before(axes, call, [total], [0], lambda totals: totals.sum(0, dtype=scanned.dtype))
    return scanned + before


def _cumprod(axes: Axes, call: Call, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scanned = _scan(axes, call, x, dim, dtype=dtype)
    total = x.prod(dim, keepdim=True, dtype=scanned.dtype)
    (before,) = _before(axes, call, [total], [1], lambda totals: totals.prod(0, dtype=scanned.dtype))
    return scanned * before


def _logcumsumexp(axes: Axes, call: Call, x: Tensor, dim: int) -> Tensor:
    total = x.logsumexp(dim, keepdim=True)
    (before,) = _before(axes, call, [total], [-math.inf], lambda totals: totals.logsumexp(0))
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
        best, at = _before(axes, call, [last, place], [neutral, -1], self._best)
        wins = values >= best if self.kind == "max" else values <= best
        own = (at < 0) | (values != values) | (wins & (best == best))
        return torch.where(own, values, best), torch.where(own, places, at)

    def _best(self, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        best = values.amax(0) if self.kind == "max" else values.amin(0)
        is_best = (values == best) | ((values != values) & (best != best))
        return best, torch.where(is_best, places, torch.full_like(places, -1)).amax(0)


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
