"""Reports of plans: their figures are the plan's, in a terminal and as a page."""

import io
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

import spmd
from spmd import P
from spmd.api.programs.missing_rules import MissingRuleWarning
from spmd.core.quantity import size_text, time_text
from spmd.inspect import Plan
from spmd.inspect.report.charts import ticks
from spmd.inspect.report.figures import make_report
from spmd.inspect.report.html import render_page
from spmd.inspect.report.words import in_words, machine_figures
from spmd.inspect.saving.document import make_document
from spmd.plan_report import main, make_console

VOID = {"meta"}


class Page(HTMLParser):
    """What a page holds: rows of cells, titles of bars, attributes; every tag must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.bars: list[dict[str, str | None]] = []
        self.headings: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "rect":
            self.bars.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "h3":
            self.headings.append(data)


def step(w: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.softmax(torch.relu(x @ w["l_0_a"])[:, 0:12] @ w["l_1_a"], -1).square().sum()  # <b>&"'

    grads = torch.func.grad(loss)(w)
    return {name: w[name] - grads[name] for name in w}


def deep(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = torch.relu(x @ weight)
    return x


def planned_layers() -> Plan:
    """Three layers on ranks that have rows of x, and the weight of the last layer in parts."""
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    f = spmd.jit(deep, ([P(), P(), P("data")], P("data")), P("data"), mesh=mesh)
    return f.plan([torch.empty(256, 256, device="meta")] * 3, torch.empty(65536, 256, device="meta"))


def planned() -> Plan:
    mesh = spmd.make_mesh({"data": 2, "model": 2}, runtime="abstract")
    specs = {"l_0_a": P("data"), "l_1_a": P("data")}
    f = spmd.jit(step, (specs, P("data")), specs, mesh=mesh)
    weights = {"l_0_a": torch.empty(64, 16), "l_1_a": torch.empty(12, 64)}
    return f.plan(weights, torch.empty(4096, 64))


def test_a_report_has_the_figures_of_the_plan() -> None:
    plan = planned()
    report = make_report(make_document(plan))
    sent, seconds = (sum(getattr(comm, name) for comm in plan.comms) for name in ("bytes", "seconds"))
    assert plan.comms
    assert plan.seconds == pytest.approx(report.seconds)
    assert (sent, seconds) == pytest.approx((report.bytes, report.communication))
    assert (sent, seconds) == pytest.approx(
        (sum(c.bytes for c in report.causes), sum(c.seconds for c in report.causes))
    )
    assert (sent, seconds) == pytest.approx(
        (sum(line.bytes for line in report.lines), sum(line.communication for line in report.lines))
    )
    assert report.compute == pytest.approx(sum(line.compute for line in report.lines))
    assert len(plan.graph.operations) == sum(line.operations for line in report.lines)
    assert len(plan.comms) == sum(cause.count for cause in report.causes)
    assert plan.memory.peak == report.memory["peak"]


def test_equal_layers_have_one_cause() -> None:
    def sums(*arrays: torch.Tensor) -> list[torch.Tensor]:
        return [array.sin() for array in arrays]

    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    plan = spmd.jit(lambda w: sums(*w["l"]), P("data"), P(), mesh=mesh).plan({"l": [torch.empty(64)] * 3})
    (cause,) = make_report(make_document(plan)).causes
    assert (3, "all_gather") == (cause.count, cause.kind)


def test_layers_are_shown_by_how_they_lie(tmp_path: Path) -> None:
    plan = planned_layers()
    (layers,) = plan.layers
    line = deep.__code__.co_firstlineno + 2
    rows = [
        (
            f"test_plan_report.py:{line}",
            numbers,
            "2",
            time_text(alike.compute),
            time_text(alike.communication),
            size_text(alike.bytes),
            alike.otherwise,
        )
        for numbers, alike in zip(("0-1 of 3", "2 of 3"), layers.alike, strict=True)
    ]
    page = Page(plan.to_html())
    assert ["Plan", "Timeline", "Memory", "Layers", "Lines", "Collectives", "Machine"] == page.headings
    assert set(rows) <= {tuple(row) for row in page.rows}
    plan.save(tmp_path / "plan.json")
    console = Console(file=io.StringIO(), width=200)
    main([str(tmp_path / "plan.json")], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for cells in rows:
        assert re.search(".*".join(map(re.escape, cells)), printed)


def test_the_timeline_is_in_order_and_has_no_gaps() -> None:
    report = make_report(make_document(planned()))
    clock = 0.0
    for span in report.spans:
        assert span.start == pytest.approx(clock)
        clock += span.seconds
    assert clock == pytest.approx(report.seconds)
    assert {"compute", *(cause.kind for cause in report.causes)} == {span.kind for span in report.spans}


def test_the_page_is_html_with_all_figures() -> None:
    plan = planned()
    page = Page(plan.to_html())
    assert ["Plan", "Timeline", "Memory", "Lines", "Collectives", "Machine"] == page.headings
    report = make_report(make_document(plan))
    rows = [tuple(row) for row in page.rows]
    for cause in report.causes:
        figures = str(cause.count), f"{cause.bytes:,.0f}", time_text(cause.seconds)
        assert (cause.kind, ", ".join(cause.axes), *figures, cause.cause, cause.place) in rows
    assert any("<b>&\"'" in cell for row in rows for cell in row)  # the line's code, escaped and read again
    assert ("step", time_text(plan.timing.step)) in rows
    assert len(report.spans) == len(page.bars)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = planned().to_html()
    assert not re.search(r"https?:|//|url\(|@import|<script|<link|<img|<iframe", text)
    names = {name for name, _ in Page(text).attributes}
    assert names.isdisjoint({"src", "href", "srcset", "data", "action"})


def test_a_notebook_shows_the_same_without_a_page_around_it() -> None:
    plan = planned()
    fragment = plan._repr_html_()
    Page(fragment)
    assert fragment in plan.to_html()
    assert "<html" not in fragment


def test_a_plan_without_operations_has_a_page() -> None:
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    plan = spmd.jit(lambda x: x, P("data"), P("data"), mesh=mesh).plan(torch.empty(4))
    Page(plan.to_html())
    assert 0 == make_report(make_document(plan)).seconds


def test_the_program_prints_tables_and_writes_the_page(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    console = Console(file=io.StringIO(), width=200)
    assert 0 == main([str(tmp_path / "plan.json"), "--html", str(tmp_path / "page.html"), "--rows", "2"], console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("data=2, model=2", time_text(plan.timing.step), size_text(sum(comm.bytes for comm in plan.comms))):
        assert text in printed
    assert "[:, 0:12]" in printed  # not taken for markup
    assert " others " in printed
    assert plan.to_html() == (tmp_path / "page.html").read_text() == render_page(make_report(make_document(plan)))


def test_a_file_that_is_no_plan_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main([str(tmp_path / "none.json")], Console(file=io.StringIO()))
    assert "none.json cannot be read" in capsys.readouterr().err


def test_the_console_is_wide_enough_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert 160 <= make_console().width


def test_fallbacks_are_reported(tmp_path: Path) -> None:
    @torch.library.custom_op("spmd_tests::unruled", mutates_args=())
    def unruled(x: torch.Tensor) -> torch.Tensor:
        return x.sort().values

    unruled.register_fake(torch.empty_like)
    mesh = spmd.make_mesh({"data": 2}, runtime="abstract")
    with pytest.warns(MissingRuleWarning):
        plan = spmd.jit(lambda x: unruled(x), P("data"), P(), mesh=mesh).plan(torch.empty(4))
    plan.save(tmp_path / "plan.json")
    console = Console(file=io.StringIO(), width=200)
    main([str(tmp_path / "plan.json")], console)
    for text in (console.file.getvalue(), plan.to_html()):  # type: ignore[attr-defined]
        assert "without a rule" in text
        assert "spmd_tests.unruled.default at test_plan_report.py" in text


def test_amounts_and_times_for_people() -> None:
    assert ["999 B", "1 kB", "1.5 GB", "2 TB"] == [size_text(n) for n in (999, 999.7, 1.5e9, 2e12)]
    assert ["0.5 us", "1 ms", "2 s"] == [time_text(seconds) for seconds in (5e-7, 1e-3, 2)]


def test_partial_specs_are_named() -> None:
    text = planned().to_html()
    assert "partial=" not in text
    assert "and a partial sum over" in text or "a partial sum over" in text
    assert "P(('x', 'y')) and a partial max over z, q" == in_words("P(('x', 'y'), partial={'z': 'max', 'q': 'max'})")
    assert "f produces P('a'), g requires a partial sum over b" == in_words(
        "f produces P('a'), g requires P(partial={'b': 'sum'})"
    )


def test_the_memory_chart_has_the_peak_on_the_clock_of_the_timeline() -> None:
    plan = planned()
    report = make_report(make_document(plan))
    assert len(plan.graph.operations) == len(report.held)
    assert plan.memory.peak == max(held.bytes for held in report.held)
    assert 0.0 == report.held[0].start
    assert all(one.stop == two.start for one, two in itertools.pairwise(report.held))
    assert report.seconds == pytest.approx(report.held[-1].stop)
    (event,) = {n for n, o in enumerate(plan.graph.operations) if o is plan.memory.operation}
    assert plan.memory.peak == report.held[event].bytes


@pytest.mark.parametrize("total", [3e-9, 1e-6, 4.1e-6, 9.99e-4, 0.25, 17.0])
def test_ticks_are_round_and_few(total: float) -> None:
    found = ticks(total)
    assert 2 <= len(found) <= 11
    assert 0.0 == found[0]
    assert total * 0.5 < found[-1] <= total * (1 + 1e-6)
    assert all(len(f"{tick:.6e}".partition("e")[0].rstrip("0").rstrip(".")) <= 3 for tick in found)


def test_the_machine_is_a_table() -> None:
    rows = [tuple(row) for row in Page(planned().to_html()).rows]
    assert ("links", "400 GB/s") in rows
    figures = machine_figures(spmd.Machine.preset("h100_nvlink", axis_bandwidth={"data": 5e10}))
    assert "989.5 Tflop/s" == figures["arithmetic in bfloat16"]
    assert "50 GB/s" == figures["links along data"]
