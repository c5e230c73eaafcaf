"""`python -m proofs.rule_check`: the proof of the rules as a command."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

from proofs.op_sweep.cases import entries
from proofs.rule_calls.known import UNKNOWN, known_rows, reason_of
from proofs.rule_calls.recorded import operator, recall, record, select, signature
from proofs.rule_check.command import main
from proofs.rule_check.prove import Task, prove
from proofs.rule_check.tables import Proof
from spmd.core.placement import Partial, Replicate, Shard
from spmd.rules import RULES, factors
from spmd.testing.rule_check import Finding, Report

aten = torch.ops.aten
_MM = ["--op", "aten.mm.default$", "--handmade", "--missing"]

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def test_what_is_proved_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main([*_MM, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    (mm,) = found["operators"]
    assert ("aten.mm.default", 1, 6, 12, [], []) == tuple(
        mm[key] for key in ("op", "calls", "strategies", "right", "wrong", "missing")
    )
    assert (5, 0, "0.0%") == tuple(list(found["summary"].values())[-3:])
    assert "aten.mm.default" in capsys.readouterr().out


def test_a_wrong_rule_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {aten.mm.default: factors("i k, k j -> i j", max="k")}
    assert 1 == main([*_MM, "--json", str(tmp_path / "found.json")], wrong)
    (mm,) = json.loads((tmp_path / "found.json").read_text())["operators"]
    assert {"row": "S1, S0 -> max", "call": "aten.mm.default(f64[4,5], f64[5,3])", "ranks": 2}.items() <= (
        mm["wrong"][0].items()
    )
    assert {"sum, R -> sum", "R, sum -> sum", "S1, S0 -> sum"} == {finding["row"] for finding in mm["missing"]}
    assert "wrong: aten.mm.default" in capsys.readouterr().out


def test_a_rule_without_calls_fails() -> None:
    proof = Proof(searched=False)
    proof.take(Report("aten.mine.default"))
    assert proof.failed


def test_a_rule_that_ends_its_process_fails() -> None:
    class Ending(Task):
        def prove(self, missing: bool) -> Report:
            os._exit(3)

    (found,) = prove([Ending(aten.mm.default, RULES[aten.mm.default], [])], missing=False, jobs=1)
    proof = Proof(searched=False)
    proof.take(found)
    assert ["aten.mm.default: ended its process with 3"] == proof.lost and proof.failed


def test_a_pattern_without_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["--op", "aten.none", "--handmade"])
    assert "No operator with a rule has 'aten.none' in its name" in capsys.readouterr().out


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("proofs.rule_check.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(SystemExit, match=r"needs rich.progress. It runs in a clone"):
        runpy.run_module("proofs.rule_check", run_name="__main__")


def test_a_page_keeps_what_is_around_the_summary(tmp_path: Path) -> None:
    page, proof = tmp_path / "rules.md", Proof(searched=True)
    row = (Replicate(), Partial("max")), (Shard(0),)
    proof.take(Report("aten.mine.default", 1, 2, 4, (), 3, (Finding("aten.mine.default(f64[4])", 3, *row),)))
    page.write_text("# Rules\n")
    proof.write_markdown(page)
    first = page.read_text()
    page.write_text(first + "\nThe end.\n")
    proof.write_markdown(page)
    assert page.read_text() == first + "\nThe end.\n"
    assert first.startswith("# Rules\n") and "| missing, share | 33.3% |" in first
    assert f"| {UNKNOWN} | 1 | `mine.default`: R, max -> S0 |" in first


def test_calls_of_the_database_are_recorded_with_their_values() -> None:
    (entry,) = entries("addmm$")
    recorded = recall(record(entry))
    assert {aten.addmm.default, aten.mm.default} <= {call.op for call in recorded}
    assert all(call.provable for call in recorded if call.op is aten.mm.default)
    chosen = select(recorded, 2)
    assert all(len(calls) <= 2 for calls in chosen.values())
    args, kwargs = chosen[aten.mm.default][0]
    assert aten.mm.default(*args, **kwargs).ndim == 2
    assert signature(args, kwargs) == signature([torch.zeros_like(arg) for arg in args], kwargs)
    assert operator("aten.mm.default") is aten.mm.default


def test_known_rows_have_one_reason() -> None:
    listed = [(op, row) for _, op, row in known_rows()]
    assert len(listed) == len(set(listed))
    finding = Finding("", 2, (Replicate(),), (Replicate(),))
    assert UNKNOWN == reason_of("aten.mm.default", finding)


@pytest.mark.rules
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # when calls are loaded
def test_all_rules(tmp_path: Path) -> None:
    assert 0 == main(["--missing", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {(report["op"], finding["row"]) for report in found["operators"] for finding in report["missing"]}
    assert {(op, row) for _, op, row in known_rows()} == rows
    assert found["summary"]["of them missing"] < 0.05 * found["summary"]["valid rows found by search"]
