"""The line on the terminal while a compilation takes long."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest
import torch

import spmd
from spmd import P
from spmd.api.programs import progress

MESH = spmd.make_mesh({"x": 2}, runtime="virtual")
ERASE = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Let a terminal be there for the test that runs: in a fixture, pytest would replace it."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setattr(progress, "DELAY", 0.05)
    return made


def slow(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.5)
    return x * 2


def compile_slowly() -> None:
    made = spmd.jit(slow, P("x"), mesh=MESH)(torch.ones(4))
    assert torch.equal(torch.full((4,), 2.0), made.full_tensor())


@pytest.mark.parametrize("has_rich", [True, False])
def test_function_and_stage_are_named_and_erased(has_rich: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    compile_slowly()
    written = terminal.getvalue()
    assert "spmd: tracing slow ..." in written.partition(ERASE)[0]
    assert written.endswith(ERASE) and "\n" not in written
    assert written.count("...") == written.count(ERASE)


def test_layers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return self.linear(x)

    model = torch.nn.Sequential(*(Layer() for _ in range(6)))
    x = torch.ones(2, 4)
    found = spmd.jit(lambda model, x: model(x), (P(), P("x")), mesh=MESH)(model, x)
    torch.testing.assert_close(found.full_tensor(), model(x))
    lines = terminal.getvalue().split(ERASE)
    assert any("... 6 of 6 Layer" in line for line in lines) and "" == lines[-1]


def test_later_stages_are_of_the_same_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY", 0.8)
    for name in ("tracing", "planning", "lowering"):
        with progress.stage("f", name):
            time.sleep(0.5)
    with progress.stage("g", "tracing"):
        pass
    written = terminal.getvalue()
    assert "planning f" in written and "lowering f" in written and "tracing" not in written


def test_an_error_erases_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return x @ torch.ones(7)

    with pytest.raises(RuntimeError):
        spmd.jit(wrong, P("x"), mesh=MESH)(torch.ones(4))
    assert terminal.getvalue().endswith(ERASE)


@pytest.mark.parametrize("why", ["quick", "no terminal", "another rank", "no stderr"])
def test_nothing_is_written(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    if why == "quick":
        monkeypatch.setattr(progress, "DELAY", 60.0)
    elif why == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    elif why == "another rank":
        monkeypatch.setattr(progress, "process_index", lambda: 1)
    else:
        monkeypatch.setattr(sys, "stderr", None)
    before = threading.active_count()
    compile_slowly()
    assert "" == terminal.getvalue()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # timers that were cancelled are about to end
    assert threading.active_count() <= before


def test_threads_that_compile_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    threads = [threading.Thread(target=compile_slowly) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert terminal.getvalue().count("...") == terminal.getvalue().count(ERASE) >= 3
