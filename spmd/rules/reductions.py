"""Reductions over dims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from spmd.collectives import pmax, psum
from spmd.placement import Reduction
from spmd.rules.builders import argument_dims, reduction
from spmd.rules.partial import keeps_max, keeps_min, linear
from spmd.rules.rule import Body, Call, Factors, Rule

aten = torch.ops.aten


def neutral_value(kind: Reduction, dtype: torch.dtype) -> float:
    """What a reduction ignores: zero for sum, the smallest value of the dtype for max, the largest for min."""
    if kind == "sum":
        return 0
    if dtype.is_floating_point:
        return -math.inf if kind == "max" else math.inf
    if dtype == torch.bool:
        return kind == "min"
    return torch.iinfo(dtype).min if kind == "max" else torch.iinfo(dtype).max


def _neutral(kind: Reduction, value: float | None = None) -> Body:
    """The neutral element, or `value`, everywhere: what the reduction of an empty shard adds to that of the others."""

    def body(_: tuple[str, ...], call: Call, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        (result,) = call.results
        return x.new_full(result.shape, neutral_value(kind, result.dtype) if value is None else value)

    return body


def _logsumexp(
    axes: tuple[str, ...], call: Call, x: torch.Tensor, dim: list[int], keepdim: bool = False
) -> torch.Tensor:
    over = argument_dims(call, "dim", x.ndim)
    largest = pmax(row_max(x, over), axes)
    # A row of infinities has no finite shift: exp(x - inf) would be nan.
    shift = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    total = psum((x - shift).exp().sum(over, keepdim=True), axes)
    result = total.log() + shift
    return result if keepdim else result.squeeze(over)


def row_max(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The maximum over dims, kept with length 1; the smallest value of the dtype where there are no elements."""
    if all(x.shape[dim] for dim in dims):
        return x.amax(dims, keepdim=True)
    return x.new_full([1 if dim in dims else size for dim, size in enumerate(x.shape)], neutral_value("max", x.dtype))


_MAX = reduction("max", keeps_max("self"), empty=_neutral("max"))
_MIN = reduction("min", keeps_min("self"), empty=_neutral("min"))
_FLAT_MAX = reduction("max", keeps_max("self"), dims=None, empty=_neutral("max"))
_FLAT_MIN = reduction("min", keeps_min("self"), dims=None, empty=_neutral("min"))

_NORMS = {
    1: reduction("sum"),
    0: reduction("sum"),
    math.inf: reduction("max"),
    -math.inf: reduction("min"),
}


def _vector_norm(call: Call) -> Factors:
    return _NORMS.get(call.argument("ord"), reduction(None)).factorize(call)


def _empty_norm(axes: tuple[str, ...], call: Call, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A norm is at least zero, which only the minimum of all elements does not ignore."""
    body = _neutral("min") if call.argument("ord") == -math.inf else _neutral("max", 0)
    return body(axes, call, x)


REDUCTION: Mapping[torch._ops.OpOverload, Rule] = MappingProxyType(
    {
        aten.sum.default: reduction("sum", linear("self"), dims=None),
        aten.sum.dim_IntList: reduction("sum", linear("self")),
        aten.mean.default: reduction(None, linear("self"), dims=None),
        aten.mean.dim: reduction(None, linear("self")),
        aten.amax.default: _MAX,
        aten.amin.default: _MIN,
        aten.max.default: _FLAT_MAX,
        aten.min.default: _FLAT_MIN,
        aten.any.default: reduction("max", dims=None),
        aten.any.dim: reduction("max"),
        aten.any.dims: reduction("max"),
        aten.all.default: reduction("min", dims=None),
        aten.all.dim: reduction("min"),
        aten.all.dims: reduction("min"),
        aten.median.default: reduction(None, dims=None),
        aten.nanmedian.default: reduction(None, dims=None),
        aten.prod.default: reduction(None, dims=None),
        aten.prod.dim_int: reduction(None),
        aten.var.correction: reduction(None),
        aten.std.correction: reduction(None),
        aten.var_mean.correction: reduction(None),
        aten.logsumexp.default: reduction(None, body=_logsumexp),
        aten.linalg_vector_norm.default: Rule(_vector_norm, empty=_empty_norm),
    }
)
