"""A part of torch's modules through `spmd.jit`; `make test-rules` runs all of them."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from proofs.nn_sweep.call import Call, Role, call, trial
from proofs.nn_sweep.placements import MOST_OPERATIONS, layouts
from proofs.nn_sweep.pool import sweep
from proofs.nn_sweep.report import markdown
from proofs.nn_sweep.setups import SETUPS, Setup
from proofs.nn_sweep.subjects import (
    HANDMADE,
    NOT_MODULES,
    REASONS,
    Subject,
    missing_functions,
    module_names,
    subjects,
)
from proofs.nn_sweep.sweep import sweep_subject
from proofs.op_sweep.command import Report
from proofs.op_sweep.outcome import BAD, Outcome, Status
from proofs.page import section, write_section
from spmd.core.mesh import Mesh
from spmd.core.placement import Replicate, Shard

X = Mesh(("x",), (4,))


def subject(name: str) -> Subject:
    (found,) = subjects(f"{name}$")
    return found


def assert_right(outcome: Outcome) -> None:
    assert outcome.status is Status.PASS, f"{outcome.name}: {outcome.failures}"
    assert outcome.passed == outcome.combinations > 0


@pytest.mark.parametrize(
    "name", ["nn.LazyBatchNorm2d", "nn.Dropout1d", "nn.Module", "nn.MultiLabelMarginLoss", "nn.functional.conv_tbc"]
)
def test_modules_in_training_with_gradients(name: str) -> None:
    outcome = sweep_subject(subject(name), Setup({"x": 4}, training=True, calls=0, placements=2))
    assert_right(outcome)
    assert [] == outcome.fallbacks


@pytest.mark.parametrize("name", ["nn.Unflatten", "nn.functional.celu_", "fft.fftfreq"])
def test_two_axes(name: str) -> None:
    assert_right(sweep_subject(subject(name), Setup({"x": 2, "y": 2}, backward=False, calls=1)))


def test_inputs_that_are_otherwise_in_memory() -> None:
    assert_right(sweep_subject(subject("nn.Tanh"), Setup({"x": 4}, backward=False, calls=1, memory=True)))


def test_every_public_class_and_function_has_a_call() -> None:
    found = subjects()
    assert [] == [one.name for one in found if not one.handmade and one.database is None]
    assert {one.name for one in found if one.is_module} == set(module_names()) - NOT_MODULES.keys()
    assert set(missing_functions()) <= HANDMADE.keys() <= {one.name for one in found}


def test_buffers_are_results_and_stay_as_they_are() -> None:
    module = nn.BatchNorm1d(3)
    found = trial(call(module, torch.randn(5, 3).double()), "", training=True, backward=False)
    assert found is not None
    _, mean, _, count = found.case.function(*found.case.tensors)
    assert (0, 1) == (module.num_batches_tracked, count)
    assert module.running_mean is not None
    assert torch.equal(torch.zeros(3).double(), module.running_mean)
    assert not torch.equal(mean, module.running_mean)


def test_written_parameters_are_results() -> None:
    table = nn.Embedding(9, 6, max_norm=0.1)
    before = table.weight.detach().double()
    found = trial(call(table, torch.arange(9)), "", training=True, backward=False)
    assert found is not None
    _, after = found.case.function(*found.case.tensors)
    assert torch.equal(before, table.weight)
    assert after.norm(dim=1).max() < 0.11 < before.norm(dim=1).max()


def test_gradients_are_those_of_autograd() -> None:
    x, module = torch.randn(5, 3).double().requires_grad_(), nn.Linear(3, 2)
    found = trial(call(module, x), "", training=True, backward=True)
    assert found is not None
    assert (Role.PARAMETER, Role.PARAMETER, Role.INPUT, Role.COTANGENT) == found.roles
    _, *gradients = found.case.function(*found.case.tensors)
    expected = torch.autograd.grad(module(x), [*module.parameters(), x], found.case.tensors[-1])
    assert [] == [one for one, other in zip(gradients, expected, strict=True) if not torch.allclose(one, other)]


def test_targets_without_a_gradient_are_left_out() -> None:
    given = call(nn.CTCLoss(), torch.randn(4, 2, 3).double().log_softmax(2), torch.ones(2, 2).long(), (4, 4), (2, 2))
    with pytest.raises(RuntimeError, match="data pointer"):  # torch.func has no gradient of it
        trial(given, "", training=True, backward=True)
    assert trial(Call(torch.argmax, (torch.randn(3),)), "", training=True, backward=True) is None


def test_layouts() -> None:
    found = trial(call(nn.Linear(3, 2), torch.randn(5, 3)), "", training=True, backward=False)
    assert found is not None
    chosen = layouts(found, X, 20, operations=1)
    weights, biases, inputs = zip(*chosen, strict=True)
    assert {(Replicate(),), (Shard(0),), (Shard(1),)} == set(weights) == set(inputs)
    assert {(Replicate(),), (Shard(0),)} == set(biases)
    assert (chosen[::3], chosen[1::3]) == tuple(layouts(found, X, -(-len(chosen) // 3), 1, turn) for turn in (0, 1))
    assert chosen[:1] == layouts(found, X, 20, operations=2 * MOST_OPERATIONS)


class _Differs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if type(x) is torch.Tensor else x + 1


class _Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class _Hangs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while type(x) is not torch.Tensor:
            time.sleep(0.1)
        return x


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_what_is_wrong_hangs_or_is_refused_is_told_apart() -> None:
    modules = {"right": nn.Tanh(), "wrong": _Differs(), "hang": _Hangs(), "refused": _Branches()}
    x = torch.rand(4, 2)
    made = [Subject(name, True, [partial(call, module, x)]) for name, module in modules.items()]
    setup = Setup({"x": 2}, backward=False)
    assert_right(sweep_subject(made[0], setup))
    found = {outcome.name: outcome for outcome in sweep(made, setup, jobs=2, seconds=2)}
    expected = {"right": Status.PASS, "wrong": Status.WRONG, "hang": Status.HANG, "refused": Status.UNTRACEABLE}
    assert expected == {name: outcome.status for name, outcome in found.items()}
    report = Report(setup, list(found.values()), 1.0)
    assert report == Report.of(json.loads(json.dumps(report.data())), Setup)
    page = markdown({"eval": report})
    assert "| hang | hang | eval | 0 of 0 |  | the time was up |" in page
    assert "1 of 4 functions (25.0%) pass in every call and setup, and 1 (25.0%) in every call but" in page


def test_sections_of_a_page_leave_each_other_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for name, text in (("first", "one\n"), ("second", "two\n"), ("first", "three\n")):
        write_section(page, name, text)
    assert ("three\n", "two\n", "") == tuple(section(page.read_text(), name) for name in ("first", "second", "third"))


def test_the_page_has_every_module_and_function() -> None:
    page = section((Path(__file__).parents[2] / "proofs" / "reports" / "operators.md").read_text(), "nn_sweep")
    if f"(torch {torch.__version__.split('+')[0]})" not in page:
        pytest.skip("the page is of another version of torch")
    rows = page.split("## Every module and function")[1].splitlines()
    assert {one.name for one in subjects()} == {row.split(" | ")[0].removeprefix("| ") for row in rows[6:] if row}
    failing = page.split("do not pass\n\n")[1].split("\n\n")[0].splitlines()[2:]
    assert REASONS.keys() >= {row.split(" | ")[0].removeprefix("| ") for row in failing}


@pytest.mark.rules
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", SETUPS)
def test_every_module_and_function(name: str) -> None:
    torch.set_num_threads(1)
    bad = [outcome for outcome in sweep(subjects(), SETUPS[name]) if outcome.status in BAD]
    assert [] == [(outcome.name, outcome.status, outcome.reason) for outcome in bad]
