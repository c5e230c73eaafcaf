"""What memory layouts kernels need: the table against runs of the operators, and what the runs can tell."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch

from proofs.rule_check.command import main
from proofs.rule_check.layouts import LayoutProof, LayoutTask, check_all, layout_tasks
from spmd.rules import layouts
from spmd.rules.layouts import DOCUMENTED, PROBED, Need, need
from spmd.testing.rule_check.expected import Expected, perturbed
from spmd.testing.rule_check.layouts import LayoutReport, check_layouts
from spmd.testing.rule_check.strides import layouts as layouts_of

aten = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A process that was forked off has none of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("layouts_test", "DEF") as made:
        yield made


def test_layouts_have_the_same_values_in_other_memory() -> None:
    x = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    found = {layout.name: layout(x) for layout in layouts_of(x)}
    same = [layout.name for layout in layouts_of(x) if not layout.is_expanded]
    assert all(torch.equal(x, found[name]) and not Need.CONTIGUOUS.is_met(found[name]) for name in same)
    assert (60, 1, 15, 3) == found["channels last"].stride() and 0 == found["expanded along 1"].stride(1)
    assert {"offset", "padded rows", "every other row", "first dims swapped"} == {
        name for name in same if Need.ROWS.is_met(found[name])
    }


@pytest.mark.parametrize(
    "x", [torch.ones(3), torch.arange(6), torch.ones(2, 3) > 0, torch.ones(2, 2, 2, dtype=torch.cfloat)]
)
def test_layouts_of_all_dtypes(x: torch.Tensor) -> None:
    assert all(torch.equal(x, layout(x)) for layout in layouts_of(x) if not layout.is_expanded)


def test_contiguous_is_what_a_new_tensor_is() -> None:
    x = torch.ones(6, 1)
    assert Need.CONTIGUOUS.is_met(x) and Need.CONTIGUOUS.is_met(torch.ones(0, 3).t())
    assert x.t().contiguous().t().is_contiguous()
    for other in (x.as_strided((6, 1), (1, 6)), x[1:], x[::2]):
        assert not Need.CONTIGUOUS.is_met(other)
        assert Need.CONTIGUOUS.is_met(Need.CONTIGUOUS.lay_out(other)) and torch.equal(
            other, Need.CONTIGUOUS.lay_out(other)
        )
    assert x.as_strided((6, 1), (1, 6)) is not None and Need.ROWS.lay_out(x[1:]).data_ptr() == x[1:].data_ptr()


def test_operators_of_others_need_contiguous_operands(library: torch.library.Library) -> None:
    library.define("mine(Tensor x) -> Tensor")
    assert Need.CONTIGUOUS is need(torch.ops.layouts_test.mine.default, "x")
    assert Need.ANY is need(aten.mm.default, "mat2") and Need.ROWS is need(
        aten._scaled_dot_product_flash_attention.default, "key"
    )


def test_the_table_names_arguments_that_there_are() -> None:
    for name, needs in (*PROBED.items(), *DOCUMENTED.items()):
        _, packet, overload = name.split(".")
        op = getattr(getattr(aten, packet, None), overload, None)
        if op is None:  # of other versions of torch
            continue
        arguments = {argument.name for argument in op._schema.arguments}
        assert arguments & set(needs), name
        assert name in DOCUMENTED or set(needs) <= arguments
    assert not PROBED.keys() & DOCUMENTED.keys()


def _mine(library: torch.library.Library, body: object, schema: str = "(Tensor x, Tensor y) -> Tensor") -> object:
    library.define(f"mine{schema}")
    library.impl("mine", body, "CPU")
    return torch.ops.layouts_test.mine.default


def test_a_kernel_that_reads_memory_is_found(library: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    op = _mine(library, lambda x, y: x + y.as_strided(y.shape, torch.empty(y.shape).stride()))
    monkeypatch.setattr(layouts, "_KNOWN", frozenset({"layouts_test"}))
    report = check_layouts(op, [((torch.randn(3, 4, 5), torch.randn(3, 4, 5)), {})])
    assert {"y": Need.CONTIGUOUS} == report.found
    assert report.failing and {"y"} == {run.arguments[0] for run in report.failing if len(run.arguments) == 1}
    assert "other values" in str(report.failing[0])


def test_a_kernel_that_needs_rows_is_found(library: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    op = _mine(library, lambda x, y: x + y.as_strided(y.shape, (*y.stride()[:-1], 1)))
    monkeypatch.setattr(layouts, "_KNOWN", frozenset({"layouts_test"}))
    assert {"y": Need.ROWS} == check_layouts(op, [((torch.randn(3, 4, 5), torch.randn(3, 4, 5)), {})]).found
    # Of a matrix there are too few layouts of rows to tell.
    assert {"y": Need.CONTIGUOUS} == check_layouts(op, [((torch.randn(4, 5), torch.randn(4, 5)), {})]).found


def test_a_kernel_that_refuses_a_pair_is_found(library: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous() and not y.is_contiguous():
            raise RuntimeError("not both")
        return x + y

    op = _mine(library, body)
    monkeypatch.setattr(layouts, "_KNOWN", frozenset({"layouts_test"}))
    found = check_layouts(op, [((torch.randn(4, 5), torch.randn(4, 5)), {})]).found
    assert {"x": Need.CONTIGUOUS, "y": Need.CONTIGUOUS} == found


def test_what_the_table_asks_for_in_vain_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "PROBED", {"aten.mul.Tensor": {"self": Need.CONTIGUOUS}})
    report = check_layouts(aten.mul.Tensor, [((torch.randn(4, 5), torch.randn(4, 5)), {})])
    assert (("self",), ()) == (report.unneeded, report.failing)
    proof = LayoutProof()
    proof.take(report)
    assert proof.failed


def test_draws_and_memory_that_nobody_wrote_are_no_findings() -> None:
    x = torch.randn(4, 5)
    assert () == check_layouts(aten.bernoulli.default, [((x.sigmoid(),), {})]).sensitive
    assert () == check_layouts(aten.empty_like.default, [((x,), {})], values=False).sensitive


def test_rounding_is_no_finding_and_another_value_is() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, generator=generator)
    expected = Expected.of(x.sum(), x.sum(), perturbed(x, generator).sum())
    assert expected.difference(x.flip(0).sum()) is None
    assert "other values" == expected.difference(x.sum() + 0.01)
    assert "f64" in (expected.difference(x.sum().double()) or "") or "float64" in (
        expected.difference(x.sum().double()) or ""
    )
    assert Expected.of(x, x + 1, x).difference(torch.zeros(100)) is None  # other values each time


_FAST = ["view_as_complex", "_embedding_bag_per_sample", "native_group_norm", "aten.mkldnn_rnn_layer.default$",
         "median", "_scaled_mm", "aten.mm.default$", "aten.reshape.default$",
         "native_batch_norm_backward", "slice_scatter"]  # fmt: skip


@pytest.mark.parametrize("pattern", _FAST)
def test_the_table_is_what_handmade_calls_show(pattern: str) -> None:
    proof = LayoutProof()
    for found in check_all(layout_tasks(pattern, {}), jobs=1):
        proof.take(found)
    assert ([], []) == (proof.lost, [str(run) for report in proof.reports for run in report.failing])
    assert proof.reports and [] == [(report.op, report.unneeded) for report in proof.reports if report.unneeded]


def test_an_operator_that_ends_its_process_is_run_as_the_table_allows() -> None:
    @attrs.frozen(eq=False)
    class Ending(LayoutTask):
        always: bool = False

        def check(self) -> LayoutReport:
            if self.always or not self.met:
                os._exit(3)
            return super().check()

    calls = [((torch.ones(4, 3, 2),), {})]
    tasks = [Ending(aten.cos.default, calls), Ending(aten.neg.default, calls, always=True)]
    report, lost = check_all(tasks, jobs=1)
    assert (
        isinstance(report, LayoutReport) and report.crashed and not report.found and not report.failing and report.runs
    )
    assert "aten.neg.default: ended its process with 3" == lost


def test_the_command_writes_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "rules.md"
    page.write_text("# Rules\n")
    options = ["--op", "aten.view_as_complex.default$", "--handmade", "--layouts", "--jobs", "1"]
    assert 0 == main([*options, "--json", str(tmp_path / "found.json"), "--markdown", str(page)])
    found = json.loads((tmp_path / "found.json").read_text())
    (operator,) = found["operators"]
    assert ({"self": "CONTIGUOUS"}, [], []) == tuple(operator[key] for key in ("found", "unneeded", "failing"))
    assert operator["runs"] == found["summary"]["layouts run"] and operator["sensitive"]
    assert "aten.view_as_complex.default" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("# Rules\n") and "| `aten.view_as_complex.default` | contiguous: self |" in text
    assert f"| layouts run | {operator['runs']} |" in text
    assert 2 == main(["--op", "aten.none", "--handmade", "--layouts"])


@pytest.mark.rules
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # when calls are loaded
def test_the_table_is_what_all_calls_show(tmp_path: Path) -> None:
    main(["--layouts", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    wrong = [run for operator in found["operators"] for run in operator["failing"]]
    unneeded = [(operator["op"], operator["unneeded"]) for operator in found["operators"] if operator["unneeded"]]
    assert ([], [], []) == (wrong, unneeded, found["lost"])
