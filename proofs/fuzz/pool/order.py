"""Sorting and selecting the largest elements."""

from __future__ import annotations

from collections.abc import Mapping

from proofs.fuzz.pool.operator import Draw, Operator, along


def _topk(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True)
    dim = d.dim(x)
    d.distinct(x, dim)
    count = d.integer(1, x.shape[dim])
    return f"{x}.topk({count}, {dim}, largest={d.maybe()})"


def _kthvalue(d: Draw) -> str:
    x = d.floats((1, 4), nonempty=True)
    dim = d.dim(x)
    d.distinct(x, dim)
    return f"{x}.kthvalue({d.integer(1, x.shape[dim])}, {dim}, keepdim={d.maybe()})"


def _int_sort(d: Draw) -> str:
    x = d.ints((1, 3))
    return f"torch.sort({x}, dim={d.dim(x)}, stable=True)"


def _int_topk(d: Draw) -> str:
    x = d.ints((1, 3), nonempty=True)
    return f"{x}.topk({d.integer(1, x.shape[-1])}).values"


OPERATORS: Mapping[str, Operator] = {
    "sort": along("{x}.sort({d}, descending={k})", distinct=True, nonempty=False),
    "sort_stable": along("torch.sort({x}, dim={d}, stable=True).values", nonempty=False),
    "sort_values_of_equal": along("({x} * 2).round().sort({d}).values", nonempty=False),
    "argsort": along("torch.argsort({x}, {d}, descending={k})", distinct=True, nonempty=False),
    "argsort_stable": along("torch.argsort(({x} * 2).round(), dim={d}, stable=True)", nonempty=False),
    "msort": along("torch.msort({x})", distinct=True),
    "topk": _topk,
    "kthvalue": _kthvalue,
    "int_sort": _int_sort,
    "int_topk": _int_topk,
    "rank": along("{x}.argsort({d}).argsort({d})", distinct=True),
}
