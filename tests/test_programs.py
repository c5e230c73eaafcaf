"""Random whole programs, values, gradients and collectives, on random meshes against one device and their plans."""

from __future__ import annotations

import hypothesis
import pytest
import torch

from spmd.collectives.traffic import record_traffic
from spmd.dtensor import DTensor
from spmd.lower.verify import verify
from spmd.placement import REDUCTIONS
from spmd.testing.operators import OPERATORS, SHARDING
from spmd.testing.programs import Case, Program, Step, agree, cases
from spmd.testing.strategies import AXIS_NAMES
from spmd.testing.traffic import comms_differences

# torch's first use of forward-mode differentiation scripts functions, which it deprecates itself.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def check(case: Case) -> None:
    step = case.jitted()
    verify(step.lower(*case.arguments))
    with record_traffic() as traffic:
        results = step(*case.arguments)
    assert [] == comms_differences(step.plan(*case.arguments), traffic)
    expected = case.program(*case.whole)
    assert list(case.out_specs) == [result.spec.pspec for result in results]
    for result, truth in zip(results, expected, strict=True):
        assert isinstance(result, DTensor)
        assert agree(result.full_tensor(), truth), (result.full_tensor(), truth)


@hypothesis.settings(max_examples=40)
@hypothesis.given(cases())
def test_any_program_equals_one_device(case: Case) -> None:
    check(case)


@pytest.mark.slow
@hypothesis.settings(max_examples=1500)
@hypothesis.given(cases(max_steps=10))
def test_many_programs_equal_one_device(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (4, 3), (2, 3, 4), (2, 1, 3, 2)])
@pytest.mark.parametrize("operator", [*OPERATORS, *SHARDING])
def test_operators_are_total(operator: str, shape: tuple[int, ...]) -> None:
    """Every operator takes any two tensors, so that any list of steps is a program."""
    for other in ((), (3,), (4, 3), (0, 2)):
        for number in (0, 3, 9, 17):
            program = Program((Step(operator, 0, 1, number),), gradient=True)
            program(torch.ones(other, dtype=torch.float64), torch.ones(shape, dtype=torch.float64))
            program(torch.ones(other, dtype=torch.float64), torch.ones(shape, dtype=torch.int64))


def test_cases_are_varied() -> None:
    """The generator reaches what it is for: every operator, all kinds of specs, empty and uneven shards."""
    seen: set[object] = set()

    @hypothesis.settings(max_examples=600, phases=[hypothesis.Phase.generate], derandomize=True)
    @hypothesis.given(cases(max_steps=8))
    def draw(case: Case) -> None:
        seen.update(step.operator for step in case.program.steps)
        seen.update(case.mesh.names)
        for spec in (*(argument.spec.pspec for argument in case.arguments), *case.out_specs):
            seen.update(op for _, op in spec.partial)
            seen.update(("axes", len(axes)) for axes in spec.dims)
        seen.update("uneven" for argument in case.arguments if not argument.spec.is_even)
        seen.update("empty" for argument in case.arguments for shard in argument.shards if not shard.numel())
        seen.update("0-d" for argument in case.arguments if not argument.ndim)

    draw()
    wanted = {*OPERATORS, *SHARDING, *AXIS_NAMES, *REDUCTIONS, ("axes", 1), ("axes", 2), "uneven", "empty", "0-d"}
    assert set() == wanted - seen
