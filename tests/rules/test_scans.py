"""Scans and products along a sharded dim: values, gradients, and what they send."""

from __future__ import annotations

from collections.abc import Callable

import optree
import pytest
import torch
from sampling import product

import spmd
from spmd import P
from spmd.core.spec import TensorMeta
from spmd.ir.call import Call
from spmd.rules import find_rule
from spmd.tracing.canonicalize.canonicalize import canonicalize
from spmd.tracing.trace import trace

BYTES_COUNT = spmd.Machine(link_bandwidth=1.0, latency=0.0)
"""A machine on which bytes alone decide: small tensors are not gathered."""

Function = Callable[[torch.Tensor], torch.Tensor]

SCANS: dict[str, Function] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0)[0],
    "cummin": lambda x: x.cummin(0)[0],
    "prod of a dim": lambda x: x.prod(0),
    "prod": lambda x: x.prod(),
}


def gradient(function: Function) -> Function:
    return torch.func.grad(lambda x: (function(x) ** 2).sum())


@pytest.mark.parametrize("name", SCANS)
def test_rows_are_sent_and_not_shards(name: str) -> None:
    x = torch.empty(4096, 1024, device="meta")
    step = spmd.jit(gradient(SCANS[name]), (P("x"),), P("x"), mesh=spmd.make_mesh({"x": 8}, runtime="virtual"))
    assert 8 * 7 * 1024 * 4 > sum(comm.bytes for comm in step.plan(x).comms)


@pytest.mark.parametrize(("name", "axes"), product(SCANS, [{"x": 3}, {"x": 2, "y": 2}]))
@pytest.mark.parametrize("rows", [2, 41, 48])
def test_values_and_gradients_are_those_of_one_device(name: str, axes: dict[str, int], rows: int) -> None:
    """Also of equal values, of which the last one is the extreme, and of columns with one zero and with several."""
    mesh = spmd.make_mesh(axes, runtime="virtual")
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[rows // 2, 1], x[0, 2], x[rows // 2, 2], x[:, 3] = 0, 0, 0, x[0, 3]
    leaf = x.clone().requires_grad_()
    (SCANS[name](leaf) ** 2).sum().backward()
    for function, expected in ((SCANS[name], SCANS[name](x)), (gradient(SCANS[name]), leaf.grad)):
        step = spmd.jit(function, (P(tuple(axes)),), None, mesh=mesh, machine=BYTES_COUNT)
        (found,) = optree.tree_leaves(step(x))
        torch.testing.assert_close(found.full_tensor(), expected)
        assert 2 == rows or "over a sharded dim" in str([comm.cause for comm in step.plan(x).comms])


@pytest.mark.parametrize(
    "values", [[torch.nan, 1.0, torch.nan, 2.0, 0.0], [-torch.inf] * 5, [2.0, torch.inf, 1.0, 2.0, 1.0]]
)
def test_positions_of_running_extremes(values: list[float]) -> None:
    axes = ("x", "y")
    mesh = spmd.make_mesh({"x": 2, "y": 4}, runtime="virtual")  # the rank in the middle has none of 5 rows
    x, meta = torch.tensor(values), TensorMeta((5,), torch.float32)
    for op in (torch.ops.aten.cummax.default, torch.ops.aten.cummin.default):
        call = Call(op, (meta, 0), {}, (meta, TensorMeta((5,), torch.int64)))
        rule = find_rule(op)
        assert rule is not None
        (row,) = rule.factorize(call).rows  # a plan would gather so few rows
        local = spmd.shard_map(
            lambda x, body=row.body, call=call: body(axes, call, x, 0), in_specs=P(axes), out_specs=P(axes), mesh=mesh
        )
        for each, expected in zip(spmd.jit(local, P(axes), None, mesh=mesh)(x), op(x, 0), strict=True):
            torch.testing.assert_close(each.full_tensor(), expected, equal_nan=True)


def test_a_flip_before_and_after_a_scan_is_a_scan_from_the_end() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(1, 3)
        return torch.cat([ones, x.flip(0)]).cumsum(0).flip(0) + x.flip(0).cumsum(0).sum(0)

    graph = canonicalize(trace(function, (torch.ones(4, 3),)).graph)
    found = [operation.name for operation in graph.operations]
    assert ["full", "flip", "cat", "reverse_cumsum", "cumsum", "sum", "add"] == sorted(found, key=found.index)


@pytest.mark.parametrize("name", [name for name in SCANS if name != "prod"])
def test_each_rank_merges_some_of_many_lines(name: str) -> None:
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    x = torch.randn(5, 8193, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    for each in (SCANS[name], gradient(SCANS[name])):
        step = spmd.jit(each, (P("x"),), None, mesh=mesh, machine=BYTES_COUNT)
        torch.testing.assert_close(step(x).full_tensor(), each(x))
        assert 6 * 8193 * 8 >= sum(comm.bytes for comm in step.plan(x).comms) > 0
