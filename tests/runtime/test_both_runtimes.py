"""Every case on virtual ranks, and with a process for each rank."""

from __future__ import annotations

import pytest
import runtime_cases
from conftest import OnRanks
from sampling import product

pytestmark = pytest.mark.filterwarnings("ignore::spmd.api.programs.missing_rules.MissingRuleWarning")


MESHES = [{"x": 2, "y": 2}, {"x": 1, "y": 3}]
LONG = "a_stock_resnet"
CASES = [
    *product([name for name in runtime_cases.CASES if name != LONG], MESHES),
    *(pytest.param(LONG, axes, marks=pytest.mark.slow) for axes in MESHES),
]


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_values_are_those_of_one_device(on_ranks: OnRanks, name: str, axes: dict[str, int]) -> None:
    on_ranks(runtime_cases.run, axes, name)
