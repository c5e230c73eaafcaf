"""Tracebacks of functions under jit end at the user's line; frames of the package and of torch show where wanted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd
from spmd import P

MESH = spmd.make_mesh({"data": 2}, runtime="virtual")


def inner(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def outer(x: torch.Tensor) -> torch.Tensor:
    return inner(x).relu()


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def names(error: Exception) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][-3:]


STEP = spmd.jit(outer, mesh=MESH)
CALLS: list[Callable[[], Any]] = [
    lambda: STEP(torch.ones(8, 4)),
    lambda: STEP.lower(torch.ones(8, 4)),
    lambda: spmd.shard_map(outer, MESH, P("data"), P("data"))(torch.ones(8, 3)),
    lambda: torch.func.grad(lambda x: STEP(x).sum())(torch.ones(8, 4)),
    lambda: spmd.jit(lambda x: STEP(x), mesh=MESH)(torch.ones(8, 4)),
]


@pytest.mark.parametrize("call", CALLS)
def test_the_users_frames_are_all(call: Callable[[], Any]) -> None:
    error = raised(call)
    assert isinstance(error, RuntimeError)
    assert ["outer", "inner"] == names(error)[-2:]
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    assert [] == [file for file in files if Path(spmd.__file__).parent in file.parents]


def test_torchs_error_stays_and_a_note_says_what_to_do() -> None:
    error = raised(CALLS[0])
    assert "a and b must have same reduction dim, but got [8, 4] X [8, 4]." == str(error)
    if sys.version_info >= (3, 11):
        (note,) = error.__notes__
        assert note.startswith(
            f"torch raised this at test_tracebacks.py:{inner.__code__.co_firstlineno + 1}, in a function under jit."
        )
        assert "spmd.disable_jit()" in note
        assert "show_internals" in note


def test_other_dtypes_are_found_when_the_function_is_traced() -> None:
    other = torch.ones(4, 4, dtype=torch.float64)
    expected = raised(lambda: torch.ones(8, 4) @ other)
    error = raised(lambda: spmd.jit(lambda x: x @ other, mesh=MESH).trace(torch.ones(8, 4)))
    assert (type(expected), str(expected)) == (type(error), str(error))
    assert "<lambda>" == names(error)[-1]


@pytest.mark.parametrize("function", [lambda x: x.softmax(3), lambda x: x.log_softmax(-3), lambda x: x.cumsum(2)])
def test_other_dims_are_found_when_the_function_is_traced(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected = raised(lambda: function(torch.ones(8, 4)))
    error = raised(lambda: spmd.jit(function, mesh=MESH).trace(torch.ones(8, 4)))
    assert (type(expected), str(expected)) == (type(error), str(error))
    assert "<lambda>" == names(error)[-1]


def test_all_frames_show_where_wanted() -> None:
    with spmd.errors.show_internals():
        error = raised(CALLS[0])
    assert "inner" not in names(error)
    assert not getattr(error, "__notes__", ())
    assert "inner" == names(raised(CALLS[0]))[-1]


def test_it_holds_in_other_threads() -> None:
    found: list[Exception] = []
    with spmd.errors.show_internals():
        thread = threading.Thread(target=lambda: found.append(raised(CALLS[0])))
        thread.start()
        thread.join()
    assert "inner" not in names(found[0])


def test_the_environment_shows_all_frames() -> None:
    program = (
        "import torch, spmd\n"
        "mesh = spmd.make_mesh({'data': 2}, runtime='virtual')\n"
        "spmd.jit(lambda x: x @ x, mesh=mesh)(torch.ones(8, 4))\n"
    )
    for value, shown in (("1", True), ("0", False)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**os.environ, "SPMD_SHOW_INTERNALS": value},
        )
        assert shown == ("recorder.py" in done.stderr)


def test_a_failure_of_the_package_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    step = spmd.jit(torch.sin, mesh=MESH)
    monkeypatch.setattr(type(step), "_lookup", None)
    assert "_lookup_together" == names(raised(lambda: step(torch.ones(4))))[-1]
