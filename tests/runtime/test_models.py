"""Modules as arguments, and samples that have lengths, on virtual ranks and with a process for each rank."""

from __future__ import annotations

import model_cases
import pytest
from conftest import OnRanks


@pytest.mark.parametrize("name", model_cases.CASES)
def test_values_are_those_of_one_device(on_ranks: OnRanks, name: str) -> None:
    on_ranks(model_cases.run, {"x": 2}, name)
