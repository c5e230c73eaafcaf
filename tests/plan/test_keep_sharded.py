"""`keep_sharded` that no plan meets: the error names the arguments, and what requires them gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import P

MESH = spmd.make_mesh({"data": 2, "model": 2}, runtime="virtual")
W = torch.arange(24.0).view(6, 4)


@torch.library.custom_op("keep_sharded::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """An operator without a sharding rule."""
    return x * 2


double.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    ("function", "out_specs", "requires"),
    [
        (lambda w: w, P(), r"the result requires P\(\)"),
        (lambda w: w.t(), P(), r"the result requires P\(\)"),
        (lambda w: w, P(partial={"model": "sum"}), r"the result requires P\(partial="),
        (lambda w: spmd.constrain(w, P()) * 2, None, r"mul requires P\(\), at test_keep_sharded.py"),
        (lambda w: torch.linalg.qr(w)[0], None, r"linalg_qr requires P\(\), at test_keep_sharded.py"),
        (
            double,
            None,
            r"double requires P\(\), .*\n.*\n  Without a sharding rule: keep_sharded.double.default at test_k",
        ),
        (lambda w: w.view(3, 2, 4).sin(), None, r"sin requires P\(\)"),  # a reshape that does not carry over its shards
    ],
)
def test_the_error_names_argument_and_consumer(function: Callable[..., Any], out_specs: Any, requires: str) -> None:
    step = spmd.jit(lambda w: function(w), P("model"), out_specs, mesh=MESH, keep_sharded={0: "model"})
    gather = r"argument 0 along model: all_gather over model, \d+ bytes: input w has P\('model'\), "
    with pytest.raises(spmd.PlanError, match=f"keep_sharded cannot be met.*\n  {gather}{requires}"):
        step(W)


def test_arguments_that_can_be_kept_are_not_named() -> None:
    def step(params: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return double(params["a"]), params["b"] @ x, double(params["c"])

    kept = spmd.jit(step, (P("model"), P()), mesh=MESH, keep_sharded={"0['a']": ("model",), "0['b']": "model"})
    params = {"a": W, "b": W, "c": W}
    with pytest.raises(spmd.PlanError, match=r"argument 0\['a'\]") as caught:
        kept(params, torch.ones(4, 2))
    assert "0['b']" not in str(caught.value) and "0['c']" not in str(caught.value)


def test_two_axes_of_one_argument() -> None:
    step = spmd.jit(lambda w: double(w), P("model", "data"), mesh=MESH, keep_sharded={0: ("model", "data")})
    with pytest.raises(spmd.PlanError, match="argument 0 along data, model: all_gather over model"):
        step(W)
