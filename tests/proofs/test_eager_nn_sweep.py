"""A part of the sweep over modules, optimizers and distributions outside of `jit`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from proofs.eager_nn_sweep.report import REASONS, markdown, verdict
from proofs.eager_nn_sweep.setups import SETUPS, Setup
from proofs.eager_nn_sweep.subjects import HANDMADE, NOT_CALLED, Handmade, public_names, subjects
from proofs.eager_nn_sweep.sweep import sweep_calls
from proofs.nn_sweep.call import call
from proofs.op_sweep.command import Report
from proofs.op_sweep.outcome import Outcome, Status
from proofs.page import section

SAMPLE = (
    "nn.BatchNorm1d", "nn.GRUCell", "nn.Linear", "nn.functional.one_hot", "nn.init.sparse_", "nn.utils.clip_grad_norm_",
    "nn.utils.parametrizations.weight_norm", "optim.AdamW", "distributions.Normal", "distributions.Multinomial",
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_a_step(name: str) -> None:
    (subject,) = subjects(f"{name}$")
    outcome = sweep_calls(subject, Setup({"x": 3}, calls=1, placements=1, dtype="float64"))
    assert outcome.status is Status.PASS, outcome.failures
    assert outcome.passed == outcome.combinations > 0


def test_every_public_name_has_a_call() -> None:
    assert set() == public_names() - HANDMADE.keys() - NOT_CALLED.keys()


def test_a_wrong_result_an_error_and_a_refusal_are_told_apart() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x + int(hasattr(x, "spec"))

    def failing(x: torch.Tensor) -> torch.Tensor:
        return x if type(x) is torch.Tensor else x.missing  # type: ignore[attr-defined,no-any-return]

    def refused(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(4.0)

    for function, status in ((wrong, Status.WRONG), (failing, Status.ERROR), (refused, Status.REFUSED)):
        subject = Handmade("one", [lambda function=function: call(function, torch.ones(3, 4))])  # type: ignore[misc]
        outcome = sweep_calls(subject, Setup({"x": 2}))
        assert status is outcome.status, outcome.failures


def test_gradients_and_the_step_are_compared() -> None:
    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * (1 + hasattr(grad, "spec"))

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Other.apply(super().forward(x))  # type: ignore[no-any-return]

    outcome = sweep_calls(Handmade("one", [lambda: call(Layer(4, 3), torch.ones(5, 4).double())]), Setup({"x": 2}))
    assert outcome.status is Status.WRONG


def test_the_counts_of_a_report() -> None:
    found = [Outcome("a", Status.PASS), Outcome("b", Status.REFUSED), Outcome("c")]
    found[1].failures[Status.REFUSED] = "aten.add.Tensor has a plain tensor"
    first, second = verdict({"train": Report(SETUPS["train"], found, 1.0)})
    assert first.startswith("Of 2 names of which plain torch runs a call, 1 pass in every call and setup, 1 (50.0%)")
    assert second.startswith("1 are refused for a plain operand, 0 because")
    assert "| b | refused | train | 0 of 0 |" in markdown({"train": Report(SETUPS["train"], found, 1.0)})


def test_the_page_has_few_refusals_with_reasons_and_nothing_worse() -> None:
    page = section((Path(__file__).parents[2] / "proofs" / "reports" / "operators.md").read_text(), "eager_nn_sweep")
    rows = [line.split(" | ") for line in page.partition("What is refused")[2].splitlines() if " | " in line][1:]
    assert {"refused"} == {row[1] for row in rows}
    assert {row[0].removeprefix("| ") for row in rows} <= REASONS.keys()
    names = int(page.partition("Of ")[2].split(" ", 1)[0])
    assert len(rows) <= math.floor(0.03 * names)
    assert "0 are refused for a plain operand, 0 because torch writes to a plain tensor" in page
