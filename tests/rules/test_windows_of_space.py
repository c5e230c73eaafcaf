"""Operators on images whose spatial dims are sharded: what ranks exchange, and the same values as on one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from optree import tree_leaves
from sampling import sample

import spmd
from spmd import P
from spmd.core.placement import Shard
from spmd.rules import RULES, Factors, Rule
from spmd.rules.ops.pooling import POOLING

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool_positions": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max_pool_dilated": lambda x: F.max_pool2d(x, 3, 1, 1, 2, return_indices=True),
    "max_pool_ceil": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True, return_indices=True),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool_inside": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, (6, 3)),
    "uneven_avg_pool": lambda x: F.adaptive_avg_pool2d(x, (7, 22)),
    "reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "reflect_rows": lambda x: F.pad(x, (0, 0, 2, 1), mode="reflect"),
    "replicate_columns": lambda x: F.pad(x, (2, -3, 0, 0), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "unfold": lambda x: x.unfold(2, 4, 1).unfold(3, 3, 2),
    "nearest": lambda x: F.interpolate(x, (25, 7)),
    "nearest_exact": lambda x: F.interpolate(x, (17, 30), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, (24, 20), mode="bilinear"),
    "bilinear_corners": lambda x: F.interpolate(x, (7, 25), mode="bilinear", align_corners=True),
    "bicubic_columns": lambda x: F.interpolate(x, (12, 19), mode="bicubic"),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
}


def over_space_only(rule: Rule) -> Rule:
    """A rule with nothing but its local implementations over the two dims of space."""

    def factorize(call: Any) -> Any:
        found = rule.factorize(call)
        blank = lambda tensors: tuple(((),) * len(dims) for dims in tensors)  # noqa: E731
        rows = tuple(row for row in found.rows if row.operands[0] in (Shard(2), Shard(3)))
        return Factors(blank(found.operands), blank(found.results), {}, rows=rows)

    return attrs.evolve(rule, factorize=factorize)


SPACE = {"rules": RULES | {op: over_space_only(RULES[op]) for op in POOLING}, "machine": spmd.Machine(latency=0.0)}
"""Has no other way to run these operators on shards."""


def with_gradient(operator: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """The result of an operator, the gradient, and the positions if it returns some."""

    def f(x: torch.Tensor) -> Any:
        def split(x: torch.Tensor) -> Any:
            found = operator(x)
            return found if isinstance(found, tuple) else (found, ())

        result, pull, positions = torch.func.vjp(split, x, has_aux=True)
        return result, *pull(result.sin()), positions

    return f


LAYOUTS = {
    "rows": ({"x": 4}, P(None, None, "x")),
    "columns": ({"x": 3}, P(None, None, None, "x")),
    "rows_columns": ({"x": 2, "y": 3}, P(None, None, "x", "y")),
    "columns_rows": ({"x": 3, "y": 2}, P(None, None, "y", "x")),
    "two_axes": ({"x": 2, "y": 2}, P(None, None, ("x", "y"))),
    "batch_rows": ({"x": 2, "y": 3}, P("y", None, "x")),
}
PLACED = list(itertools.product(CASES, LAYOUTS))
FAST = [
    (name, layout)
    for name, layout in PLACED
    if layout == "rows_columns" or name in ("max_pool_positions", "reflect", "bilinear")
]


@pytest.mark.parametrize("placed", sample(PLACED, FAST))
def test_values(placed: tuple[str, str]) -> None:
    name, (mesh, spec) = placed[0], LAYOUTS[placed[1]]
    x = torch.randn(2, 3, 12, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = with_gradient(CASES[name])
    jitted = spmd.jit(f, (spec,), spec, mesh=spmd.make_mesh(mesh, runtime="virtual"), **SPACE)
    for wanted, given in zip(tree_leaves(f(x)), tree_leaves(jitted(x)), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted)


@pytest.mark.parametrize("operator, rows", [
    (CASES["max_pool"], 1), (CASES["avg_pool"], 1), (lambda x: F.avg_pool2d(x, 2), 0), (CASES["reflect"], 6),
    (CASES["replicate_columns"], 0), (CASES["bicubic_columns"], 0), (CASES["circular"], 10),
    (lambda x: x.unfold(2, 4, 1), 9), (lambda x: F.adaptive_avg_pool2d(x, 8), 0),
    (lambda x: F.adaptive_avg_pool2d(x, 400), 1),
    (lambda x: F.interpolate(x, scale_factor=2), 0),
    (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 2),
    (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 4),
])  # fmt: skip
def test_ranks_send_borders_only(operator: Callable[[torch.Tensor], Any], rows: int) -> None:
    image = torch.empty((8, 16, 512, 512), device="meta")
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    spec = P(None, None, "x")
    plan = spmd.jit(operator, (spec,), spec, mesh=mesh).plan(image)
    assert sum(row.bytes for row in plan.comms) <= rows * 8 * 16 * 516 * 4


@pytest.mark.parametrize("channels, size", [(16, 5), (7, 4), (2, 3)])
def test_neighbouring_channels_are_normalized_together(channels: int, size: int) -> None:
    mesh = spmd.make_mesh({"x": 4}, runtime="virtual")
    x = torch.randn(2, channels, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    f = with_gradient(lambda x: F.local_response_norm(x, size, alpha=1.0))
    jitted = spmd.jit(
        f, (P(None, "x"),), P(None, "x"), mesh=mesh, machine=spmd.Machine(link_bandwidth=1.0, latency=0.0)
    )
    for wanted, given in zip(tree_leaves(f(x)), tree_leaves(jitted(x)), strict=True):
        torch.testing.assert_close(given.full_tensor(), wanted)
