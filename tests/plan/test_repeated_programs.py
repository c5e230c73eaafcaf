"""Programs with equal layers are planned about as well as by the search of every layer (`proofs.repeated_layers`)."""

import attrs
import pytest
from sampling import sample

from proofs.repeated_layers import compare as comparison
from proofs.repeated_layers.compare import ERRORS, Verdict, compare
from proofs.repeated_layers.report import line, summary
from proofs.repeated_layers.tied import optima
from spmd.plan.search.options import SEARCH
from spmd.plan.search.orders import NEAR
from spmd.plan.solver.elimination import Solution


@pytest.mark.parametrize("seed", sample(range(40), fast=[13, 30, 33]))
def test_a_plan_is_about_as_fast_as_that_of_the_search_of_every_layer(seed: int) -> None:
    found = compare(seed, runs=False)
    assert found.verdict not in ERRORS, line(found)
    assert found.ratio <= NEAR, line(found)


def test_both_plans_compute_what_one_device_does() -> None:
    found = compare(30)
    assert found.verdict not in ERRORS, line(found)


@pytest.mark.parametrize("seed", [0, 7, 10, 64])
def test_plans_of_small_programs_are_not_below_the_optimum(seed: int) -> None:
    found = optima(seed)
    assert not found.mistake and found.layers > 0


def test_a_worse_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    first = attrs.evolve(SEARCH, minimize=lambda domains, tables: Solution((0,) * len(domains), 0.0))
    monkeypatch.setattr(comparison, "FOLDED", first)
    found = compare(30, runs=False)
    assert found.verdict is Verdict.WORSE and found.ratio > NEAR
    assert line(found) in summary([found])
