"""The planner's exact search, and its plans of several mesh axes, against integer programs solved by HiGHS."""

import itertools
import math

import pytest
import torch
from gpt_step import SHAPES, TENSOR_PARALLEL, gpt_step
from hypothesis import Phase, assume, given, settings
from sampling import product, sample

import gpt
import layouts
import spmd
from proofs.joint import JointProblem, joint_optimum
from proofs.joint.ascent import minimize_by_ascent
from proofs.oracle import Search, searches_of, solve_by_highs
from spmd import Machine, P
from spmd.errors import PlanError
from spmd.inspect import Plan
from spmd.plan.data.plan import PlanData
from spmd.plan.search.options import SearchOptions
from spmd.plan.search.orders import plan as search
from spmd.plan.solver.elimination import minimize
from spmd.plan.solver.table import Table
from spmd.testing.programs import Case, cases
from workloads import GptStep


def without_joins(plan: Plan) -> PlanData:
    """The plan of the same request whose moves are not joined, as the joint problem does not join them."""
    return search(plan.request, SearchOptions(joins=False))


def assert_optimal(search: Search) -> None:
    assert search.solution.cost == pytest.approx(search.optimum(), rel=1e-6)


@pytest.mark.parametrize(("name", "scale"), product(["dp", "fsdp", "tp"], [1, 64]))
def test_one_axis_is_planned_as_well_as_an_integer_program_says(name: str, scale: int) -> None:
    """Small sizes make latency count, large ones bytes."""
    specs = {"dp": P(), "fsdp": P("x"), "tp": TENSOR_PARALLEL}[name]
    params = {name: spmd.TensorMeta((a * scale, b * scale), torch.float32) for name, (a, b) in SHAPES.items()}
    tokens = spmd.TensorMeta((8, 16), torch.int64)
    mesh = spmd.make_mesh({"x": 4}, runtime="abstract")
    batch = P() if name == "tp" else P("x")
    plan = spmd.jit(gpt_step, (specs, batch), specs, mesh=mesh).plan(params, tokens)
    (found,) = searches_of(plan.request)
    assert_optimal(found)


@pytest.mark.parametrize("strategy", sample(layouts.STRATEGIES, ["dp", "fsdp_tp"]))
def test_every_axis_of_the_workload_is_planned_as_well_as_an_integer_program_says(strategy: str) -> None:
    step = GptStep(gpt.Config(layers=1), strategy, batch=16)
    searches = searches_of(step.plan().request)
    axes = len(layouts.STRATEGIES[strategy].mesh)
    # Both orders of two axes, and the better one once more: its second axis only if its first comes out otherwise.
    assert len(searches) in ((1,) if axes == 1 else (5, 6))
    for found in searches:
        assert_optimal(found)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own forward-mode differentiation
@settings(max_examples=10, phases=[Phase.generate])
@given(cases())
def test_generated_programs_are_planned_as_well_as_an_integer_program_says(case: Case) -> None:
    searches = searches_of(case.jitted().plan(*case.arguments).request)
    assume(searches)
    for found in searches:
        assert_optimal(found)


def test_a_search_that_is_not_the_best_is_seen() -> None:
    tables = [
        Table((0,), torch.tensor([2e-6, 1e-6], dtype=torch.float64)),
        Table((1,), torch.tensor([float("inf"), 1e-6, 0.0], dtype=torch.float64)),
        Table((0, 1), torch.tensor([[0.0, 0.0, 5e-6], [1e-6, float("inf"), 3e-6]], dtype=torch.float64)),
    ]
    solution = solve_by_highs([2, 3], tables)
    assert solution.cost == pytest.approx(3e-6, rel=1e-9)
    assert solution.choices == (0, 1)


def test_the_integer_program_knows_that_nothing_is_possible() -> None:
    with pytest.raises(PlanError, match="HiGHS found no optimum"):
        solve_by_highs([1], [Table((0,), torch.tensor([float("inf")], dtype=torch.float64))])


TWO_AXES = spmd.make_mesh({"data": 2, "model": 3}, runtime="abstract")
SLOW_MACHINE = Machine(flops=1e9, memory_bandwidth=1e8)
"""One on which it pays to shard small tensors."""


def mlp_layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def gram(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T


def shared(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.exp(x)
    return y.sum(), torch.relu(y)


TINY = {
    "a product": (mlp_layer, ((6, 12), (12, 18)), (P("data"), P("model")), P("data", "model")),
    "one value twice": (gram, ((12, 6),), (P("data"),), P()),
    "a value with two uses": (shared, ((12,),), (P("data"),), (P(), P("model"))),
}


@pytest.mark.parametrize("name", TINY)
def test_the_joint_optimum_is_the_best_of_all_plans(name: str) -> None:
    """Every choice of strategies on both axes, in both nestings, is made a plan."""
    function, shapes, in_specs, out_specs = TINY[name]
    metas = [spmd.TensorMeta(shape, torch.float32) for shape in shapes]
    request = spmd.jit(function, in_specs, out_specs, mesh=TWO_AXES, machine=SLOW_MACHINE).plan(*metas).request
    seconds = []
    for order in itertools.permutations(TWO_AXES.names):
        problem = JointProblem(request, order)
        strategies = set(problem.variables.values())
        counts = [count if v in strategies else 1 for v, count in enumerate(problem.domains)]
        seconds += [problem.plan(choices).seconds for choices in itertools.product(*map(range, counts))]
    found = joint_optimum(request)
    assert len(set(seconds)) > 10
    assert found.seconds == pytest.approx(min(seconds), rel=1e-9)
    assert found.plan.seconds == pytest.approx(min(seconds), rel=1e-9)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own forward-mode differentiation
@settings(max_examples=10, phases=[Phase.generate])
@given(cases())
def test_no_plan_of_two_axes_is_better_than_the_joint_optimum(case: Case) -> None:
    assume(sum(size > 1 for size in case.mesh.axes.values()) == 2)
    plan = without_joins(case.jitted().plan(*case.arguments))
    assume(plan.order)
    acquire = 4  # the planner acquires up to two shards of a value per axis
    cost = JointProblem(plan.request, plan.order, acquire).cost_of(plan)
    found = joint_optimum(plan.request, acquire)
    assert found.seconds <= cost * (1 + 1e-9)
    assert cost <= plan.seconds * (1 + 1e-9)
    assert found.seconds <= found.plan.seconds * (1 + 1e-9)


def test_a_plan_costs_the_same_as_an_assignment_of_the_joint_problem() -> None:
    plan = without_joins(GptStep(gpt.Config(layers=1), "dp_tp", batch=16).plan())
    assert JointProblem(plan.request, plan.order).cost_of(plan) == pytest.approx(plan.seconds, rel=1e-9)


def test_a_result_without_a_spec_is_sharded_on_two_axes_in_the_joint_problem() -> None:
    """`model` shards a minor part of the flat dim: without `data` it would be no result."""
    mesh = spmd.make_mesh({"data": 3, "model": 2}, runtime="abstract")
    step = spmd.jit(lambda x: x.mT.reshape(12), (P("data", "model"),), None, mesh=mesh)
    plan = without_joins(step.plan(spmd.TensorMeta((3, 2, 2), torch.float32)))
    assert "P(('data', 'model'))" in str(plan)
    assert JointProblem(plan.request, plan.order).cost_of(plan) == pytest.approx(plan.seconds, rel=1e-9)


def test_the_joint_problem_refuses_what_it_does_not_know() -> None:
    step = spmd.jit(gram, (P("data"),), P(), mesh=TWO_AXES, memory_limit=10**6)
    request = step.plan(spmd.TensorMeta((12, 6), torch.float32)).request
    with pytest.raises(PlanError, match="no memory_limit"):
        joint_optimum(request)
    alone = spmd.make_mesh({"x": 1}, runtime="abstract")
    request = spmd.jit(gram, (P(),), P(), mesh=alone).plan(spmd.TensorMeta((12, 6), torch.float32)).request
    with pytest.raises(PlanError, match="nothing to plan"):
        joint_optimum(request)


def ring(seed: int, variables: int = 8) -> tuple[list[int], list[Table]]:
    """Random tables around a ring with a chord: no tree, so the dual bound may fall short."""
    generator = torch.Generator().manual_seed(seed)
    domains = [2 + index % 3 for index in range(variables)]

    def table(*scope: int) -> Table:
        costs = torch.rand([domains[v] for v in scope], generator=generator, dtype=torch.float64)
        return Table(scope, torch.where(costs > 0.9, math.inf, costs * 1e-6))

    pairs = [(v, v + 1) for v in range(variables - 1)] + [(0, variables - 1), (1, variables // 2)]
    return domains, [table(v) for v in range(variables)] + [table(*pair) for pair in pairs]


@pytest.mark.parametrize("seed", range(10))
def test_dual_ascent_finds_the_optimum(seed: int) -> None:
    domains, tables = ring(seed)
    expected = minimize(domains, tables)
    found = minimize_by_ascent(domains, tables)
    assert found is not None
    assert found.cost == pytest.approx(expected.cost, rel=1e-9)
    assert found.choices == expected.choices
    assert minimize_by_ascent(domains, tables, below=expected.cost * 0.999) is None
    again = minimize_by_ascent(domains, tables, below=expected.cost * 1.001)
    assert again is not None
    assert again.choices == expected.choices


def test_dual_ascent_knows_that_nothing_is_possible() -> None:
    never = torch.tensor([[math.inf, 1.0], [1.0, math.inf]], dtype=torch.float64)
    tables = [Table(pair, never) for pair in ((0, 1), (1, 2), (0, 2))]  # no two of three differ
    assert minimize_by_ascent([2, 2, 2], tables) is None
    assert minimize_by_ascent([1], [Table((0,), torch.tensor([math.inf], dtype=torch.float64))]) is None


def test_dual_ascent_finds_what_costs_nothing() -> None:
    costs = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    found = minimize_by_ascent([2, 2, 2], [Table((0, 1), costs), Table((1, 2), costs), Table((0, 2), costs.flip(0))])
    assert found is not None
    assert found.cost == 0.0
