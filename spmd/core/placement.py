"""Placements: how a tensor is laid out along one mesh axis."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import attrs
import torch

from spmd.errors import ShardingError

Reduction: TypeAlias = Literal["sum", "max", "min"]
"""The reductions that can be pending in a partial value."""

REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


def _check_reduction(_: object, __: object, op: str) -> None:
    if op not in REDUCTIONS:
        raise ShardingError(f"Partial reduction must be one of {', '.join(REDUCTIONS)} (got {op!r}).")


def _check_dim(_: object, __: object, dim: int) -> None:
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ShardingError(
            f"Shard takes the number of a tensor dim (got {dim!r}). To name mesh axes, write a spec: P('data')."
        )


@attrs.frozen
class Replicate:
    """Every rank along the axis holds the whole tensor."""

    def __repr__(self) -> str:
        return "Replicate()"


@attrs.frozen
class Shard:
    """Rank `i` along the axis holds the `i`-th chunk of tensor dim `dim` (`torch.chunk` sizes, possibly empty).

    Raises:
        ShardingError: `dim` is not an integer.
    """

    dim: int = attrs.field(validator=_check_dim)

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@attrs.frozen
class Partial:
    """The tensor is the elementwise reduction `op` of the tensors that the ranks along the axis hold.

    Raises:
        ShardingError: `op` is not `"sum"`, `"max"` or `"min"`.
    """

    op: Reduction = attrs.field(default="sum", validator=_check_reduction)

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


Placement: TypeAlias = Replicate | Shard | Partial
"""How a tensor is laid out along one mesh axis; a sequence of them, one per axis, is accepted wherever a `P` is."""


def supports_reduction(op: Reduction, dtype: torch.dtype) -> bool:
    """Whether values of `dtype` can be reduced by `op`: booleans have no sum, complex numbers no max or min."""
    return dtype != torch.bool if op == "sum" else not dtype.is_complex


def combine(op: Reduction, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The elementwise reduction of two tensors of the same shape and dtype, written to `out` if that is given."""
    reduce = torch.add if op == "sum" else torch.maximum if op == "max" else torch.minimum
    return reduce(left, right, out=out)


def neutral_element(op: Reduction, dtype: torch.dtype) -> complex | float | int | bool:
    """The identity element of the reduction `op` for values of `dtype`.

    >>> neutral_element("max", torch.float32), neutral_element("min", torch.int8), neutral_element("sum", torch.int8)
    (-inf, 127, 0)
    """
    if op == "sum":
        if dtype.is_complex:
            return complex(-0.0, -0.0)
        return -0.0 if dtype.is_floating_point else 0  # 0.0 would change -0.0
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max
