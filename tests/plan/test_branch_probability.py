"""The times of a branch's sides count by its probability, and budgets by the side that sends more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import P, TensorMeta
from spmd.errors import PlanError, TraceError

MATRIX = TensorMeta((64, 64), torch.float32)
ALONE = spmd.make_mesh({"x": 1}, runtime="abstract")
FOUR = spmd.make_mesh({"x": 4}, runtime="abstract")


def product_or_twice(x: torch.Tensor, probability: Any) -> torch.Tensor:
    return spmd.cond(x.sum() > 0, lambda: (x @ x).relu(), lambda: x * 2, probability=probability)


def seconds(function: Callable[..., torch.Tensor], *arguments: TensorMeta) -> float:
    return spmd.jit(function, (P(),) * len(arguments), P(), mesh=ALONE).plan(*arguments).seconds


def test_a_side_counts_by_its_probability() -> None:
    never, seldom, always, unknown = (
        seconds(lambda x, p=p: product_or_twice(x, p), MATRIX) for p in (0.0, 0.25, 1.0, None)
    )
    assert never < always < unknown
    assert seldom == pytest.approx(never + (always - never) / 4)


def test_transforms_keep_the_probability() -> None:
    def loss(x: torch.Tensor, probability: float) -> torch.Tensor:
        return product_or_twice(x, probability).square().sum()

    never, always = (seconds(torch.func.grad(lambda x, p=p: loss(x, p)), MATRIX) for p in (0.0, 1.0))
    assert never < always


def test_switch_weighs_each_branch() -> None:
    def time(*probabilities: float) -> float:
        def chosen(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            functions = [lambda: x, lambda: x + 1, lambda: x @ x]
            return spmd.switch(index, functions, probabilities=probabilities)

        return seconds(chosen, MATRIX, TensorMeta((), torch.int64))

    assert time(1.0, 0.0, 0.0) < time(0.5, 0.25, 0.25) < time(0.0, 0.0, 1.0)


TALL = TensorMeta((2**20, 64), torch.float32)  # which is not gathered to save a sum


def summed(x: torch.Tensor) -> torch.Tensor:
    return spmd.constrain(x.sum(0), P())


def test_budgets_count_the_larger_side_whatever_its_probability() -> None:
    def function(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return spmd.cond(flag, lambda: summed(x), lambda: summed(x * summed(x)), probability=0.9)

    def plan(limit: int | str) -> spmd.Plan:
        step = spmd.jit(function, (P("x"), P()), P(), mesh=FOUR, comms={"all_reduce": limit})
        return step.plan(TALL, TensorMeta((), torch.bool))

    assert len(plan(2).comms) == 3
    sent = plan(2).comms[0].bytes
    assert len(plan(f"{2 * sent:.0f}B").comms) == 3
    with pytest.raises(PlanError, match="all_reduce: 2 with"):
        plan(1)
    with pytest.raises(PlanError, match="all_reduce: 2 with"):
        plan(f"{2 * sent - 1:.0f}B")


def test_budgets_count_trips() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return spmd.fori_loop(0, 5, lambda _, carry: summed(x * carry), torch.ones(64))

    assert len(spmd.jit(function, (P("x"),), P(), mesh=FOUR, comms={"all_reduce": 5}).plan(TALL).comms) == 1
    with pytest.raises(PlanError, match="all_reduce: 5 with"):
        spmd.jit(function, (P("x"),), P(), mesh=FOUR, comms={"all_reduce": 4}).plan(TALL)


@pytest.mark.parametrize("probability", [-0.1, 1.5, "often", True])
def test_what_is_no_probability_is_refused(probability: object) -> None:
    with pytest.raises(TraceError, match="probability must be a number between 0 and 1"):
        product_or_twice(torch.ones(2, 2), probability)


def test_probabilities_that_do_not_fit_are_refused() -> None:
    functions = [lambda: torch.zeros(()), lambda: torch.ones(())]
    for probabilities, said in (([1.0], "must be a list of 2 numbers"), ([0.5, 0.6], "must add up to 1")):
        with pytest.raises(TraceError, match=said):
            spmd.switch(0, functions, probabilities=probabilities)
