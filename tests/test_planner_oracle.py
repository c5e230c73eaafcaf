"""The planner's exact search against an integer program solved by HiGHS."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, assume, given, settings

import gpt
import layouts
import spmd
from spmd import P
from spmd.errors import PlanError
from spmd.plan.search.table import Table
from spmd.testing.oracle import Search, recorded_searches, solve_by_highs
from spmd.testing.programs import Case, cases
from workloads import GptStep


def gpt_step(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        x = F.embedding(tokens, params["tokens"])
        batch, length, width = x.shape
        q, k, v = (F.linear(x, params[n]).view(batch, length, 4, width // 4).transpose(1, 2) for n in ("q", "k", "v"))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape), params["o"])
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (width,)), params["up"])), params["down"])
        return F.cross_entropy(F.linear(x, params["tokens"]).view(batch * length, -1), tokens.view(-1))

    grads = torch.func.grad(loss)(params)
    return {name: params[name] - 0.1 * grads[name] for name in params}


SHAPES = {
    "tokens": (64, 32),
    "q": (32, 32),
    "k": (32, 32),
    "v": (32, 32),
    "o": (32, 32),
    "up": (128, 32),
    "down": (32, 128),
}
TENSOR_PARALLEL = {
    "tokens": P("x"), "q": P("x"), "k": P("x"), "v": P("x"), "o": P(None, "x"), "up": P("x"), "down": P(None, "x"),
}  # fmt: skip


def assert_optimal(search: Search) -> None:
    assert search.solution.cost == pytest.approx(search.optimum(), rel=1e-6)


@pytest.mark.parametrize("scale", [1, 64])
@pytest.mark.parametrize("specs", [P(), P("x"), TENSOR_PARALLEL], ids=["dp", "fsdp", "tp"])
def test_one_axis_is_planned_as_well_as_an_integer_program_says(specs: object, scale: int) -> None:
    """Small sizes make latency count, large ones bytes."""
    params = {name: spmd.TensorMeta((a * scale, b * scale), torch.float32) for name, (a, b) in SHAPES.items()}
    tokens = spmd.TensorMeta((8, 16), torch.int64)
    mesh = spmd.make_mesh({"x": 4}, runtime="abstract")
    batch = P() if specs is TENSOR_PARALLEL else P("x")
    with recorded_searches() as searches:
        spmd.jit(gpt_step, (specs, batch), specs, mesh=mesh).plan(params, tokens)
    (search,) = searches
    assert_optimal(search)


@pytest.mark.parametrize("strategy", layouts.STRATEGIES)
def test_every_axis_of_the_workload_is_planned_as_well_as_an_integer_program_says(strategy: str) -> None:
    step = GptStep(gpt.Config(layers=1), strategy, batch=16)
    with recorded_searches() as searches:
        step.jitted().plan(*step.arguments())
    axes = len(layouts.STRATEGIES[strategy].mesh)
    # Both orders of two axes, and the better one once more: its second axis only if its first comes out otherwise.
    assert len(searches) in ((1,) if axes == 1 else (5, 6))
    for search in searches:
        assert_optimal(search)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own forward-mode differentiation
@settings(max_examples=10, phases=[Phase.generate])
@given(cases())
def test_generated_programs_are_planned_as_well_as_an_integer_program_says(case: Case) -> None:
    with recorded_searches() as searches:
        case.jitted().plan(*case.arguments)
    assume(searches)
    for search in searches:
        assert_optimal(search)


def test_a_search_that_is_not_the_best_is_seen() -> None:
    tables = [
        Table((0,), torch.tensor([2e-6, 1e-6], dtype=torch.float64)),
        Table((1,), torch.tensor([float("inf"), 1e-6, 0.0], dtype=torch.float64)),
        Table((0, 1), torch.tensor([[0.0, 0.0, 5e-6], [1e-6, float("inf"), 3e-6]], dtype=torch.float64)),
    ]
    assert solve_by_highs([2, 3], tables) == pytest.approx(3e-6, rel=1e-9)


def test_the_integer_program_knows_that_nothing_is_possible() -> None:
    with pytest.raises(PlanError, match="HiGHS found no optimum"):
        solve_by_highs([1], [Table((0,), torch.tensor([float("inf")], dtype=torch.float64))])
