"""Matrix products in groups, as of the experts of a mixture: values and gradients for every sharding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.rules import RULES, derive_strategies

MESHES = {"2": {"x": 2}, "3": {"x": 3}, "2x2": {"x": 2, "y": 2}}
ENDS = torch.tensor([5, 5, 19, 24], dtype=torch.int32)  # the second expert has no token


def whole(*shape: int) -> torch.Tensor:
    """Small whole numbers, of which sums are exact in bfloat16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).round().clamp(-2, 2).bfloat16()


TOKENS, UP, DOWN, COTANGENT = whole(24, 8), whole(4, 8, 16), whole(4, 16, 8).div(4), whole(24, 8).clamp(-1, 1)


def experts(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    hidden = F.grouped_mm(x, up, offs=ends).relu()
    return F.grouped_mm(hidden, down, offs=ends)


def step(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor, cotangent: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    y, pull = torch.func.vjp(lambda *given: experts(*given, ends), x, up, down)
    return (y, *pull(cotangent))


LAYOUTS = {
    "replicated": (P(), P(), P()),
    "tokens": (P("x"), P(), P()),
    "experts": (P(), P("x"), P("x")),
    "hidden": (P(), P(None, None, "x"), P(None, "x")),
    "fully sharded": (P("x"), P(None, "x"), P(None, None, "x")),
}


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts(layout: str, axes: dict[str, int]) -> None:
    x, up, down = LAYOUTS[layout]
    mesh = spmd.make_mesh(axes, runtime="virtual")
    jitted = spmd.jit(step, (x, up, down, P(), x), (x, x, up, down), mesh=mesh)
    expected = step(TOKENS, UP, DOWN, ENDS, COTANGENT)
    for one, other in zip(expected, jitted(TOKENS, UP, DOWN, ENDS, COTANGENT), strict=True):
        torch.testing.assert_close(one, other.full_tensor(), rtol=2e-2, atol=0)
    assert () == jitted.plan(TOKENS, UP, DOWN, ENDS, COTANGENT).fallbacks


@pytest.mark.parametrize("layout", ["experts", "hidden"])
def test_weights_of_experts_stay_sharded(layout: str) -> None:
    mesh = spmd.make_mesh({"x": 2}, runtime="virtual")
    _, up, down = LAYOUTS[layout]
    plan = spmd.jit(experts, (P(), up, down, P()), P(), mesh=mesh, keep_sharded={1: "x", 2: "x"}).plan(
        TOKENS, UP, DOWN, ENDS
    )
    assert "all_gather" not in {comm.kind for comm in plan.comms}


def test_batches_of_matrices() -> None:
    mesh = spmd.make_mesh({"x": 2, "y": 2}, runtime="virtual")
    left, right = whole(4, 8, 16), whole(4, 16, 24)
    for specs in ((P("x"), P("x")), (P(None, "y"), P("x", None, "y")), (P("x", None, "y"), P("x", "y"))):
        made = spmd.jit(F.grouped_mm, specs, mesh=mesh)(left, right)
        torch.testing.assert_close(F.grouped_mm(left, right), made.full_tensor())


def test_every_form_has_strategies() -> None:
    rule = RULES[torch.ops.aten._grouped_mm.default]
    meta = lambda *shape: spmd.TensorMeta(shape, torch.bfloat16)  # noqa: E731
    ends = spmd.TensorMeta((4,), torch.int32)
    forms = {
        "t k g j": ((meta(24, 8), meta(4, 8, 16), ends), meta(24, 16)),
        "i j t g": ((meta(8, 24), meta(24, 16), ends), meta(4, 8, 16)),
        "i k t g": ((meta(4, 8, 16), meta(16, 24), ends), meta(8, 24)),
        "g i k j": ((meta(4, 8, 16), meta(4, 16, 24)), meta(4, 8, 24)),
    }
    for factors, (operands, result) in forms.items():
        call = spmd.rules.Call(torch.ops.aten._grouped_mm.default, operands, {}, (result,))
        assert 1 + len(factors.split()) == len(derive_strategies(rule.factorize(call)))
