"""Programs with loops are planned as well as the unrolled programs with equal trips."""

import pytest
import torch
from interpreter import evaluate
from sampling import sample

from proofs.tied_loops.optimum import NEAR, optima
from proofs.tied_loops.programs import drawn
from proofs.tied_loops.unroll import unroll

SEEDS = sample(range(200), fast=[9, 13, 17, 22])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_as_near_to_the_optimum_of_the_unrolled_program_as_it_says(seed: int) -> None:
    plan = drawn(seed).plan()
    found = optima(plan.request)
    assert found.distance <= NEAR + plan.gap, found


def test_small_plans_say_that_they_are_exact() -> None:
    assert all(drawn(seed).plan().exact for seed in (9, 13, 17, 22))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_unrolled_program_computes_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    program = drawn(seed)
    args = [torch.randn(shape, dtype=torch.float32) / 3 for shape in program.shapes]
    results = evaluate(unroll(program.plan().request.graph).graph, args)
    expected = torch.utils._pytree.tree_leaves(program.function(*args))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
