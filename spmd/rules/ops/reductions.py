"""Reductions over dims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spmd.collectives import pmax, psum
from spmd.core.placement import Reduction, neutral_element
from spmd.ir.call import Call
from spmd.rules.builders import argument_dims, reduction
from spmd.rules.notation import by_call
from spmd.rules.partial import keeps_max, keeps_min, linear
from spmd.rules.rule import Axes, Body, Rule, table


def widen(x: Tensor) -> Tensor:
    """`x` in the precision in which torch's kernels accumulate: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _neutral(kind: Reduction, value: float | None = None) -> Body:
    """The local implementation for an empty shard: its result is the reduction's neutral element, or `value`."""

    def body(_: Axes, call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (result,) = call.results
        return x.new_full(result.shape, neutral_element(kind, result.dtype) if value is None else value)

    return body


def _logsumexp(axes: Axes, call: Call, x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    over = argument_dims(call, "dim", x.ndim)
    largest = pmax(row_max(x, over), axes)
    # A row of infinities has no finite shift: exp(x - inf) would be nan.
    shift = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    total = psum((x - shift).exp().sum(over, keepdim=True), axes)
    result = total.log() + shift
    return result if keepdim else result.squeeze(over)


def row_max(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The maximum over nonnegative `dims`, which stay with length 1; over no elements, the dtype's smallest value."""
    if all(x.shape[dim] for dim in dims):
        return x.amax(dims, keepdim=True)
    return x.new_full([1 if dim in dims else size for dim, size in enumerate(x.shape)], neutral_element("max", x.dtype))


_NORMS: Mapping[float, Reduction] = {1: "sum", 0: "sum", math.inf: "max", -math.inf: "min"}


def _vector_norm(call: Call) -> Rule:
    return reduction(_NORMS.get(call.argument("ord")))


def _empty_norm(axes: Axes, call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The result for an empty shard: 0 is neutral for all norms, as they are nonnegative, except for a minimum."""
    body = _neutral("min") if call.argument("ord") == -math.inf else _neutral("max", 0)
    return body(axes, call, x)


REDUCTION = table({
    "sum": reduction("sum", linear("self"), dims=None),
    "sum.dim_IntList": reduction("sum", linear("self")),
    "mean": reduction(None, linear("self"), dims=None),
    "mean.dim": reduction(None, linear("self")),
    "amax": reduction("max", keeps_max("self"), empty=_neutral("max")),
    "amin": reduction("min", keeps_min("self"), empty=_neutral("min")),
    "max": reduction("max", keeps_max("self"), dims=None, empty=_neutral("max")),
    "min": reduction("min", keeps_min("self"), dims=None, empty=_neutral("min")),
    "any _is_any_true": reduction("max", dims=None),
    "any.dim any.dims": reduction("max"),
    "all _is_all_true": reduction("min", dims=None),
    "all.dim all.dims": reduction("min"),
    "median nanmedian prod": reduction(None, dims=None),
    "prod.dim_int var.correction std.correction var_mean.correction hash_tensor": reduction(None),
    "logsumexp": reduction(None, body=_logsumexp),
    "linalg_vector_norm": by_call(_vector_norm, empty=_empty_norm),
})  # fmt: skip
