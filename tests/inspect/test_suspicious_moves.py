"""Suspicious moves: what sends far more than comes of it is told with its line, and what is needed is not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import gpt
import layouts
import spmd
from spmd import P
from spmd.inspect import Plan
from spmd.inspect.report.figures import make_report
from spmd.inspect.saving.document import make_document
from spmd.plan.cost import suspicious_moves
from spmd.plan_report import main
from workloads import GptStep

MESH = spmd.make_mesh({"x": 8}, runtime="abstract")


def planned(f: Callable[..., Any], ins: Any, out: Any, *shapes: tuple[int, ...]) -> Plan:
    arguments = (torch.empty(shape, device="meta") for shape in shapes)
    return spmd.jit(f, ins, out, mesh=MESH).plan(*arguments)


def median_of_all(x: torch.Tensor) -> torch.Tensor:
    return x.median()


def trimmed_mean(x: torch.Tensor) -> torch.Tensor:
    return x.sort().values[100:-100].mean()


N = 2**22
SUSPICIOUS: dict[str, tuple[Any, ...]] = {
    "median": (median_of_all, (N,), "all_gather", 4, "Every rank runs median on all of it"),
    "trimmed mean": (trimmed_mean, (N,), "all_gather", 4, "Every rank runs sort on all of it"),
    "mode": (lambda x: x.mode(0).values, (2**19, 8), "all_to_all", 12, "Shard x as P(None, 'x') from the start"),
}


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_a_move_of_which_little_comes_is_listed(name: str) -> None:
    f, shape, kind, needed, advice = SUSPICIOUS[name]
    plan = planned(f, P("x"), P(), shape)
    (move,) = plan.suspicious_moves
    assert move.comm in plan.comms and (kind, needed) == (move.comm.kind, move.needed)
    assert move.advice.startswith(advice) and move.bytes == move.comm.bytes == 7 / 8 * 4 * N / (
        kind == "all_gather" or 8
    )
    assert move.source is not None and move.source.file.endswith("test_suspicious_moves.py")


NEEDED: dict[str, tuple[Any, ...]] = {
    "a weight that is gathered": (lambda w, x: x @ w, (P("x"), P("x")), P("x"), (4096, 4096), (2048, 4096)),
    "results that are asked for": (lambda x: x + 1, P("x"), P(), (N,)),
    "a part of results that are asked for": (lambda x: (x + 1, x[:5]), P("x"), (P(), P()), (N,)),
    "sums of gradients": (
        torch.func.grad(lambda w, x: (x @ w).square().sum()), (P(), P("x")), P(), (4096, 1024), (64, 4096)
    ),
    "a sort of which all is needed": (lambda x: x.sort(0).values, P("x"), P("x"), (2**16, 64)),
    "there and back": (lambda x: x.flip(0), P("x"), P("x"), (2**16 + 1, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_a_move_that_is_needed_is_not_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicious_moves, "LEAST_BYTES", 0)
    monkeypatch.setattr(suspicious_moves, "LEAST_PART", 0)
    f, ins, out, *shapes = NEEDED[name]
    plan = planned(f, ins, out, *shapes)
    assert plan.comms and plan.suspicious_moves == ()


@pytest.mark.parametrize("name", layouts.STRATEGIES)
def test_no_strategy_of_the_example_is_suspicious(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicious_moves, "LEAST_BYTES", 0)
    monkeypatch.setattr(suspicious_moves, "LEAST_PART", 0)
    plan = GptStep(gpt.Config(width=256, layers=1), name, batch=16).plan()
    assert plan.comms and plan.suspicious_moves == ()


def test_small_moves_are_not_listed() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.median(), torch.linalg.multi_dot([w] * 9)

    assert planned(median_of_all, P("x"), P(), (2**17,)).suspicious_moves == ()
    assert planned(f, (P("x"), P()), P(), (N,), (2, 2)).suspicious_moves != ()
    assert planned(f, (P("x"), P()), P(), (N,), (2**14, 2**14)).suspicious_moves == ()


def test_they_are_printed_explained_and_reported(tmp_path: Path) -> None:
    plan = planned(trimmed_mean, P("x"), P(), (N,))
    (move,) = plan.suspicious_moves
    told = "4 bytes on a rank come of it. Every rank runs sort on all of it."
    assert str(plan).splitlines()[-2] == f"# suspicious: {move.comm}" and told in str(plan).splitlines()[-1]
    assert told in str(plan.explain("sort")) and told in str(plan.explain("x")) and told not in str(plan.explain("sum"))
    (row,) = make_report(make_document(plan)).suspicious
    assert (move.bytes, 4, move.advice, str(move.source)) == (row.bytes, row.needed, row.advice, row.place)
    plan.save(tmp_path / "plan.json")
    console = Console(file=io.StringIO(), width=200)
    assert main([str(tmp_path / "plan.json"), "--html", str(tmp_path / "page.html")], console) == 0
    assert "Suspicious moves" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "<h3>Suspicious moves</h3>" in (tmp_path / "page.html").read_text()
    assert move.advice.split("'")[0] in (tmp_path / "page.html").read_text()


def test_without_them_there_is_no_section(tmp_path: Path) -> None:
    plan = planned(lambda x: x.sum(), P("x"), P(), (N,))
    plan.save(tmp_path / "plan.json")
    console = Console(file=io.StringIO(), width=200)
    main([str(tmp_path / "plan.json")], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Suspicious" not in printed + plan.to_html() and "# suspicious" not in str(plan)


def test_comms_of_names_them_with_the_line_of_the_call() -> None:
    mesh = spmd.make_mesh({"x": 8}, runtime="virtual")
    x = spmd.distribute(torch.rand(2**19), P("x"), mesh)
    jitted = spmd.jit(median_of_all, P("x"), P(), mesh=mesh)
    for _ in range(2):  # the second time by programs of the first
        with spmd.comms_of() as ran:
            x.median()
            jitted(x)
            x.sum().item()
            x.full_tensor()
        of_operator, of_function = ran.suspicious_moves
        assert of_operator.comm == ran.comms[0] and of_function.comm == ran.comms[1]
        assert [move.source.code for move in ran.suspicious_moves if move.source] == ["x.median()", "return x.median()"]
        assert "suspicious: all_gather over x, 1,835,008 bytes" in str(ran)


def test_the_report_names_the_operation_that_makes_the_peak() -> None:
    place = lambda plan: make_report(make_document(plan)).summary["at the peak"]  # noqa: E731
    plan = planned(lambda x: x + 1, P("x"), P(), (N,))
    assert place(plan) == plan.memory.place
    assert plan.memory.place.endswith("which makes 8.0 times the shards that it reads")
    assert (4 * N / 8, 4 * N) == (plan.memory.read, plan.memory.made)
    plan = planned(lambda x: x + 1, P("x"), P("x"), (N,))
    assert "makes" not in place(plan) and (4 * N / 8, 4 * N / 8) == (plan.memory.read, plan.memory.made)
