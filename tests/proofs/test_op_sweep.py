"""A part of torch's operator database through `spmd.jit`; `make test-rules` runs all of it."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch

import spmd.lowering.passes.layouts
from proofs.op_sweep.cases import cases, entries, full_name
from proofs.op_sweep.command import Report
from proofs.op_sweep.layouts import layout_cases, restrided
from proofs.op_sweep.outcome import BAD, Outcome, Status, summarize
from proofs.op_sweep.placements import combinations, difference
from proofs.op_sweep.pool import sweep
from proofs.op_sweep.report import markdown
from proofs.op_sweep.setups import SETUPS, Setup
from proofs.op_sweep.sweep import sweep_entry
from proofs.page import section
from spmd.core.mesh import Mesh
from spmd.core.spec import DTensorSpec, TensorMeta


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


@pytest.mark.parametrize(
    "name", ["addmv", "cumsum", "nn.functional.instance_norm", "nn.functional.layer_norm", "nn.functional.mse_loss"]
)
def test_gradients(name: str) -> None:
    assert_right(sweep_entry(entry(name), Setup({"x": 4}, samples=3, limit=10, backward=True)))


@pytest.mark.parametrize("name", ["addmm", "softmax"])
def test_two_axes_and_partial_operands(name: str) -> None:
    assert_right(sweep_entry(entry(name), Setup({"x": 2, "y": 2}, samples=2, limit=10, partial=True)))


@pytest.mark.parametrize("name", ["addmm", "nn.functional.batch_norm", "nn.functional.group_norm", "view_as_complex"])
def test_operands_in_other_memory(name: str) -> None:
    outcome = sweep_entry(entry(name), attrs.evolve(SETUPS["layouts"], limit=1))
    assert (Status.PASS, outcome.combinations) == (outcome.status, outcome.passed)
    assert outcome.passed >= 6


def test_gradients_of_operands_in_other_memory() -> None:
    assert_right(sweep_entry(entry("nn.functional.layer_norm"), attrs.evolve(SETUPS["layouts-backward"], limit=1)))


@pytest.mark.parametrize("name", ["nn.functional.group_norm", "nn.functional.scaled_dot_product_attention"])
def test_missing_copies_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spmd.lowering.passes.layouts, "lay_out", lambda op, args, kwargs, copy: (args, kwargs))
    outcome = sweep_entry(entry(name), attrs.evolve(SETUPS["layouts"], limit=1))
    assert outcome.status is Status.WRONG


@pytest.mark.parametrize("setup", ["eager", "eager-backward", "eager-grid"])
@pytest.mark.parametrize("name", ["addmm", "nn.functional.batch_norm", "sort"])
def test_operators_outside_jit(name: str, setup: str) -> None:
    assert_right(sweep_entry(entry(name), attrs.evolve(SETUPS[setup], limit=2)))


def test_operands_are_held_by_contiguous_tensors() -> None:
    found = list(layout_cases(entry("mm"), 8))
    assert all(tensor.is_contiguous() for case in found for tensor in case.tensors)
    (plain,) = cases(entry("mm"), 1)
    case = restrided(plain, [0], 0, copied=False)
    assert plain.tensors[0].shape == case.tensors[0].shape[::-1] and "dims reversed" in case.label
    assert torch.equal(plain.function(*plain.tensors)[0], case.function(*case.tensors)[0])


def test_what_stays_sharded_is_counted() -> None:
    outcome = sweep_entry(entry("exp"), Setup({"x": 4}, samples=1))
    assert (outcome.combinations, outcome.passed, outcome.local, outcome.sharded) == (2, 2, 1, 1)


def test_sums_in_half_precision_are_compared_to_the_size_of_their_terms() -> None:
    expected = torch.tensor([1000.0, 1.0], dtype=torch.bfloat16)
    spec = DTensorSpec.replicated(Mesh(("x",), (1,)), TensorMeta.of(expected))
    held = lambda small: torch.tensor([1000.0, small], dtype=torch.bfloat16)  # noqa: E731
    assert difference([held(4.0)], spec, expected, True) is None
    assert "Mismatched elements: 1 / 2" in (difference([held(20.0)], spec, expected, True) or "")
    assert difference([held(4.0).double()], spec, expected.double(), True) is not None


def test_calls_without_a_gradient_are_left_out() -> None:
    outcome = sweep_entry(entry("argmax"), Setup({"x": 4}, samples=2, backward=True))
    assert (outcome.status, outcome.combinations) == (Status.SKIPPED, 0)


def test_uneven_and_empty_shards_are_counted() -> None:
    outcome = sweep_entry(entry("cumsum"), Setup({"x": 4}, samples=1))  # [5, 5, 5] over 4: shards of 2, 2, 1 and 0
    assert (outcome.combinations, outcome.uneven, outcome.empty) == (4, 3, 3)
    outcome = sweep_entry(entry("cumsum"), Setup({"x": 3}, samples=1))  # shards of 2, 2 and 1
    assert (outcome.combinations, outcome.uneven, outcome.empty) == (4, 3, 0)


def test_calls_that_add_lengths() -> None:
    shapes = [
        {length for tensor in case.tensors for length in tensor.shape} for case in cases(entry("add"), 6, lengths=True)
    ]
    seen: set[int] = set()
    for lengths in shapes:
        assert not lengths <= seen
        seen |= lengths
    assert {0, 1, 5} <= seen


@pytest.mark.parametrize("name", ["bernoulli", "nn.functional.dropout"])
def test_random_operators_draw_the_same_numbers(name: str) -> None:
    assert_right(sweep_entry(entry(name), Setup({"x": 4}, samples=2, limit=4)))


def test_what_depends_on_values_is_refused() -> None:
    outcome = sweep_entry(entry("nonzero"), Setup({"x": 4}, samples=3, make_fx=True))
    assert (outcome.status, outcome.calls, outcome.refused) == (Status.REFUSED, 3, 3)
    assert "depends on the values" in outcome.reason


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
    assert_right(sweep_entry(made[0], Setup({"x": 2})))  # what every process needs, once
    found = {outcome.name: outcome for outcome in sweep(made, Setup({"x": 2}), jobs=2, seconds=6)}
    statuses = {name: outcome.status for name, outcome in found.items()}
    assert {"right": Status.PASS, "wrong": Status.WRONG, "hang": Status.HANG, "crash": Status.CRASH} == statuses
    assert "the process ended with 3" == found["crash"].reason
    report = Report(Setup({"x": 2}), list(found.values()), 1.0)
    assert report == Report.of(json.loads(json.dumps(report.data())), Setup)
    page = markdown({"forward": report})
    assert "| crash | crash | forward | 0 of 0 | the process ended with 3 |" in page
    assert "| right | 2 (1) |" in page
    assert "| combinations wrong | 2 |" in page
    assert {"entries": 4, "entries: hang": 1, "combinations": 4, "combinations right": 2}.items() <= summarize(
        list(found.values())
    ).items()


def test_combinations_of_many_operands() -> None:
    found = list(combinations([torch.ones(2, 2)] * 50, Mesh(("x", "y"), (2, 2)), limit=3, partial=False))
    assert 3 == len(set(found))


@pytest.mark.rules
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", SETUPS)
def test_the_whole_database(name: str) -> None:
    """Forward as in `proofs/reports/operators.md`; of the other setups half as many calls, for the time it takes."""
    torch.set_num_threads(1)
    setup = SETUPS[name] if name == "forward" else attrs.evolve(SETUPS[name], samples=SETUPS[name].samples // 2)
    bad = [outcome for outcome in sweep(entries(), setup) if outcome.status in BAD]
    assert [] == [(outcome.name, outcome.status, outcome.reason) for outcome in bad]


def test_the_page_has_every_entry() -> None:
    page = section((Path(__file__).parents[2] / "proofs" / "reports" / "operators.md").read_text(), "op_sweep")
    if f"torch {torch.__version__.split('+')[0]})" not in page:
        pytest.skip("the page is of another version of torch")
    rows = page.split("## Every entry")[1].splitlines()
    listed = {row.split(" | ")[0].removeprefix("| ") for row in rows if row.startswith("| ")} - {"entry"}
    assert {full_name(found) for found in entries()} == listed


def test_names_tell_variants_apart() -> None:
    assert ["std_mean", "std_mean.unbiased"] == sorted(full_name(found) for found in entries("std_mean"))
