"""Reductions over dims."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from spmd.core.placement import Reduction, neutral_element
from spmd.ir.call import Call
from spmd.rules.builders import reduction
from spmd.rules.notation import by_call
from spmd.rules.ops import merges
from spmd.rules.partial import keeps_max, keeps_min, linear
from spmd.rules.rule import Axes, Body, Rule, table


def _neutral(kind: Reduction, value: float | None = None) -> Body:
    """The local implementation for an empty shard: its result is the reduction's neutral element, or `value`."""

    def body(_: Axes, call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (result,) = call.results
        return x.new_full(result.shape, neutral_element(kind, result.dtype) if value is None else value)

    return body


_NORMS: Mapping[float, Reduction] = {1: "sum", 0: "sum", math.inf: "max", -math.inf: "min"}


def _vector_norm(call: Call) -> Rule:
    kind = _NORMS.get(call.argument("ord"))
    return reduction(kind, body=None if kind else merges.vector_norm)


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
    "median nanmedian": reduction(None, dims=None),
    "prod": reduction(None, dims=None, body=merges.Merged(merges.prod)),
    "prod.dim_int": reduction(None, merges.merged_by_line(merges.prod), body=merges.Merged(merges.prod)),
    "var.correction std.correction var_mean.correction hash_tensor": reduction(None),
    "logsumexp": reduction(None, body=merges.logsumexp),
    "linalg_vector_norm": by_call(_vector_norm, empty=_empty_norm),
})  # fmt: skip
