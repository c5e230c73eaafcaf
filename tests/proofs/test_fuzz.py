"""The fuzz over whole programs: its fast part, and that seeds mean programs."""

import os

import pytest
from sampling import sample

from proofs.fuzz import check
from proofs.fuzz.batches import check_seeds
from proofs.fuzz.check import check_seed
from proofs.fuzz.environment import Environment, Rejected
from proofs.fuzz.generate import generate
from proofs.fuzz.outcome import Status


@pytest.mark.parametrize("first", sample(range(0, 50, 10), [0]))  # half a second for each program
def test_programs(first):
    outcomes = [check_seed(seed) for seed in range(first, first + 10)]
    assert [] == [outcome for outcome in outcomes if outcome.status not in (Status.RIGHT, Status.SKIPPED)]


def test_a_seed_is_a_program():
    assert generate(7).definitions() == generate(7).definitions()
    assert generate(7).definitions() != generate(8).definitions()


def test_a_process_that_ends_while_it_generates_costs_one_program(monkeypatch):
    monkeypatch.setattr(check, "generate", lambda seed: os._exit(1) if seed == 1 else generate(seed))
    found = {outcome.seed: outcome.status for outcome in check_seeds(range(4), jobs=1)}
    assert {0: Status.RIGHT, 1: Status.SKIPPED, 2: Status.RIGHT, 3: Status.RIGHT} == found


@pytest.mark.parametrize(
    ("line", "is_defined"),
    [
        ("x.scatter_add_(0, torch.zeros(2, 2, dtype=torch.int64), x[:1].expand(2, 2))", False),
        ("x[0].mul_(x[1])", True),
        ("x.add_(x)", True),
    ],
)
def test_a_program_reads_nothing_that_it_writes_to_as_another_tensor(line, is_defined):
    environment = Environment()
    environment.run("x = torch.ones(2, 2)")
    if is_defined:
        environment.run(line)
    else:
        with pytest.raises(Rejected, match="elements that it reads"):
            environment.run(line)
