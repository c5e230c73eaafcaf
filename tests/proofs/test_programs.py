"""Random whole programs, values, gradients and collectives, on random meshes against one device and their plans."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch

import spmd
from spmd.api.values.dtensor import DTensor
from spmd.collectives.traffic import record_traffic
from spmd.core.placement import REDUCTIONS
from spmd.lowering.verify import verify
from spmd.testing.operators import OPERATORS, SHARDING
from spmd.testing.programs import Case, RandomProgram, RandomStep, agree, cases
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
    for result, truth, spec in zip(results, expected, case.out_specs, strict=True):
        assert isinstance(result, DTensor)
        assert result.spec.pspec == spec if spec is not None else not result.spec.partial
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
            program = RandomProgram((RandomStep(operator, 0, 1, number),), gradient=True)
            program(torch.ones(other, dtype=torch.float64), torch.ones(shape, dtype=torch.float64))
            program(torch.ones(other, dtype=torch.float64), torch.ones(shape, dtype=torch.int64))


def test_cases_are_varied() -> None:
    """The generator reaches what it is for: every operator, all kinds of specs, empty and uneven shards."""
    seen: set[object] = set()

    @hypothesis.settings(max_examples=350, phases=[hypothesis.Phase.generate], derandomize=True)
    @hypothesis.given(cases(max_steps=24))
    def draw(case: Case) -> None:
        seen.update(step.operator for step in case.program.steps)
        seen.update(case.mesh.names)
        seen.update("free" for spec in case.out_specs if spec is None)
        for spec in (*(argument.spec.pspec for argument in case.arguments), *filter(None, case.out_specs)):
            seen.update(op for _, op in spec.partial)
            seen.update(("axes", len(axes)) for axes in spec.dims)
        seen.update("uneven" for argument in case.arguments if not argument.spec.is_even)
        seen.update("empty" for argument in case.arguments for shard in argument.shards if not shard.numel())
        seen.update("0-d" for argument in case.arguments if not argument.ndim)

    draw()
    wanted = {
        *OPERATORS,
        *SHARDING,
        *AXIS_NAMES,
        *REDUCTIONS,
        ("axes", 1),
        ("axes", 2),
        "uneven",
        "empty",
        "0-d",
        "free",
    }
    assert set() == wanted - seen


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.lerp(x, y, 0.3),
        lambda x, y: torch.lerp(y, x, 0.3),
        lambda x, y: (x * 3).long(),
        lambda x, y: x.to(torch.float8_e4m3fn).float(),
        lambda x, y: x.clamp(-1, 1) * 2 + y,
    ],
    ids=["lerp", "lerp from the end", "integers", "8 bits", "clamp"],
)
def test_ranks_that_hold_nothing_of_an_extreme(function: Any, op: Any) -> None:
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    pending = spmd.P(partial={"data": op})

    def placed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return function(spmd.reshard(x.sin(), pending), y)

    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    result = spmd.jit(placed, (spmd.P(), spmd.P()), pending, mesh=mesh)(x, y)
    torch.testing.assert_close(result.full_tensor(), function(x.sin(), y))
