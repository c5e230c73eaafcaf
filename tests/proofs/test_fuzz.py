"""The fuzz over whole programs: its fast part, and that seeds mean programs."""

import pytest

from proofs.fuzz.check import check_seed
from proofs.fuzz.generate import generate
from proofs.fuzz.outcome import Status


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_programs(first):
    outcomes = [check_seed(seed) for seed in range(first, first + 10)]
    assert [] == [outcome for outcome in outcomes if outcome.status not in (Status.RIGHT, Status.SKIPPED)]


def test_a_seed_is_a_program():
    assert generate(7).definitions() == generate(7).definitions()
    assert generate(7).definitions() != generate(8).definitions()
