"""Scans along a dim that may be sharded: each rank scans its shard and adds the totals of the shards before it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from spmd.collectives import all_gather, axis_index
from spmd.core.placement import Shard
from spmd.ir.call import Call
from spmd.rules.builders import along
from spmd.rules.notation import Rows
from spmd.rules.partial import linear
from spmd.rules.rule import Axes, Body, Row, table


def _before(totals: Tensor, neutral: float, axes: Axes) -> Tensor:
    """Every rank's totals in a new first dim, with `neutral` for this rank and the ranks after it."""
    gathered = all_gather(totals, axes)
    rank = torch.arange(gathered.shape[0], device=totals.device).view(-1, *[1] * totals.ndim)
    return torch.where(rank < axis_index(axes), gathered, torch.full_like(gathered, neutral))


def _cumsum(axes: Axes, call: Call, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scanned = x.cumsum(dim, dtype=dtype)
    total = x.sum(dim, keepdim=True, dtype=scanned.dtype)
    return scanned + _before(total, 0, axes).sum(0, dtype=scanned.dtype)


def _cumprod(axes: Axes, call: Call, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    scanned = x.cumprod(dim, dtype=dtype)
    total = x.prod(dim, keepdim=True, dtype=scanned.dtype)
    return scanned * _before(total, 1, axes).prod(0, dtype=scanned.dtype)


def _logcumsumexp(axes: Axes, call: Call, x: Tensor, dim: int) -> Tensor:
    total = x.logsumexp(dim, keepdim=True)
    return torch.logaddexp(x.logcumsumexp(dim), _before(total, -math.inf, axes).logsumexp(0))


def _scanned(body: Body) -> Rows:
    """The strategy that shards the scanned dim of operand and result; `body` does not support complex numbers."""

    def rows(call: Call) -> Iterator[Row]:
        (operand,) = call.operands
        if operand.ndim and not operand.dtype.is_complex:
            cut = Shard(call.argument("dim") % operand.ndim)
            yield Row((cut,), (cut,), body)

    return rows


SCAN = table({
    "cumsum": along(linear("self"), _scanned(_cumsum)),
    "cumprod": along(_scanned(_cumprod)),
    "logcumsumexp": along(_scanned(_logcumsumexp)),
    "cummax cummin": along(),
})  # fmt: skip
