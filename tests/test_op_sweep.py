"""A part of torch's operator database through `spmd.jit`; `make test-rules` runs all of it."""

from __future__ import annotations

import pytest
import torch

from spmd.testing.op_sweep.cases import entries, full_name
from spmd.testing.op_sweep.pool import sweep
from spmd.testing.op_sweep.sweep import Outcome, Setup, Status, sweep_entry

_BAD = (Status.WRONG, Status.ERROR, Status.HANG, Status.CRASH)


def entry(name: str) -> object:
    (found,) = entries(f"{name}$")
    return found


def assert_right(outcome: Outcome) -> None:
    assert outcome.status is Status.PASS, f"{outcome.name}: {outcome.failures}"
    assert outcome.passed == outcome.combinations > 0


@pytest.mark.parametrize(
    "name",
    ["addmv", "addbmm", "gather", "mean", "fft.rfft", "linalg.eigh", "linalg.slogdet", "unfold", "view_as_complex",
     "nn.functional.avg_pool2d", "nn.functional.batch_norm", "nn.functional.cross_entropy",
     "nn.functional.grid_sample"],
)  # fmt: skip
def test_operators(name: str) -> None:
    outcome = sweep_entry(entry(name), Setup({"x": 4}, samples=4, limit=12))
    assert_right(outcome)
    assert outcome.fallbacks == []


@pytest.mark.parametrize("name", ["addmv", "cumsum", "nn.functional.layer_norm", "nn.functional.mse_loss"])
def test_gradients(name: str) -> None:
    assert_right(sweep_entry(entry(name), Setup({"x": 4}, samples=3, limit=10, backward=True)))


@pytest.mark.parametrize("name", ["addmm", "softmax"])
def test_two_axes_and_partial_operands(name: str) -> None:
    assert_right(sweep_entry(entry(name), Setup({"x": 2, "y": 2}, samples=2, limit=10, partial=True)))


def test_what_stays_sharded_is_counted() -> None:
    outcome = sweep_entry(entry("exp"), Setup({"x": 4}, samples=1))
    assert (outcome.combinations, outcome.passed, outcome.local, outcome.sharded) == (2, 2, 1, 1)


def test_calls_without_a_gradient_are_left_out() -> None:
    outcome = sweep_entry(entry("argmax"), Setup({"x": 4}, samples=2, backward=True))
    assert (outcome.status, outcome.combinations) == (Status.SKIPPED, 0)


def test_random_numbers_are_refused() -> None:
    outcome = sweep_entry(entry("bernoulli"), Setup({"x": 4}, samples=1))
    assert outcome.status is Status.REFUSED
    assert "draws from torch's global generator" in outcome.failures[0]


class _Entry:
    """An entry of the database that does what it is told."""

    variant_test_name = ""

    def __init__(self, name: str, op: object) -> None:
        self.name, self.op = name, op

    def supported_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float64}

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> list[object]:
        from torch.testing._internal.opinfo.core import SampleInput

        return [SampleInput(torch.ones(4, dtype=dtype))]


def _hang(x: torch.Tensor) -> torch.Tensor:
    while True:
        pass


def _differs(x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) and type(x) is torch.Tensor else x + 1


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_wrong_results_hangs_and_crashes_are_told_apart() -> None:
    import os

    made = [
        _Entry("right", torch.sin),
        _Entry("wrong", _differs),
        _Entry("hang", _hang),
        _Entry("crash", lambda x: os._exit(3)),
    ]
    found = {outcome.name: outcome for outcome in sweep(made, Setup({"x": 2}), jobs=2, seconds=4)}
    statuses = {name: outcome.status for name, outcome in found.items()}
    assert {"right": Status.PASS, "wrong": Status.WRONG, "hang": Status.HANG, "crash": Status.CRASH} == statuses
    assert ["the process ended with 3"] == found["crash"].failures


@pytest.mark.rules
@pytest.mark.parametrize(
    "setup",
    [
        Setup({"x": 4}, limit=24),
        Setup({"x": 4}, samples=3, limit=8, backward=True),
        Setup({"x": 2, "y": 2}, samples=2, limit=6, partial=True),
    ],
    ids=["forward", "backward", "two axes, partial"],
)
def test_the_whole_database(setup: Setup) -> None:
    torch.set_num_threads(1)
    bad = [outcome for outcome in sweep(entries(), setup) if outcome.status in _BAD]
    assert [] == [(outcome.name, outcome.failures[:1]) for outcome in bad]


def test_names_tell_variants_apart() -> None:
    assert ["std_mean", "std_mean.unbiased"] == sorted(full_name(found) for found in entries("std_mean"))
