"""Differences of plans."""

from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.inspect import Plan

SHAPES = (64, 32), (32, 48)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sum(0)


LINE = layer.__code__.co_firstlineno + 1


def planned(x: P = P("data"), w: P = P(), function: Any = layer, ranks: int = 4, **options: Any) -> Plan:  # noqa: B008
    mesh = spmd.make_mesh({"data": ranks}, runtime="abstract")
    metas = (spmd.TensorMeta(shape, torch.float32) for shape in SHAPES)
    return spmd.jit(function, (x, w), P(), mesh=mesh, **options).plan(*metas)


def test_equal_plans_do_not_differ() -> None:
    found = planned().diff(planned())
    assert not found
    assert "The plans are the same." == str(found)


def test_values_collectives_and_figures_that_differ_are_listed() -> None:
    first, second = planned(), planned(P(), P(None, "data"))
    found = first.diff(second)
    changed = {change.name: (change.before, change.after) for change in found.values}
    assert ("P('data')", "P()") == changed["x f32[64,32]"]
    assert ("P('data')", "P(None, 'data')") == changed["relu f32[64,48]"]
    removed, added = found.comms
    assert ("all_reduce", 2 * 3 / 4 * 48 * 4, 1, 0) == (removed.kind, removed.bytes, removed.before, removed.after)
    assert ("all_gather", 3 / 4 * 48 * 4, 0, 1) == (added.kind, added.bytes, added.before, added.after)
    assert (first.seconds, second.seconds) == found.seconds
    assert (288.0, 144.0) == found.bytes
    assert (first.memory.peak, second.memory.peak) == found.memory
    lines = str(found).splitlines()
    assert "bytes sent      288 -> 144" == lines[1]
    assert "  relu f32[64,48]: P('data') -> P(None, 'data')" in lines
    assert any(line.startswith("  - all_reduce over data, 288 bytes: sum produces P(partial=") for line in lines)
    assert any(line.startswith("  + all_gather over data, 144 bytes: ") for line in lines)
    assert all(line.endswith(f"at test_difference.py:{LINE}") for line in lines if line.startswith(("  - ", "  + ")))


def test_figures_alone_make_a_difference() -> None:
    found = planned().diff(planned(machine=spmd.Machine(latency=1e-3)))
    assert found
    assert () == found.values == found.comms
    assert found.seconds[0] < found.seconds[1]


def test_other_programs_have_values_of_their_own() -> None:
    def longer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).sin().sum(0)

    (change,) = planned().diff(planned(function=longer)).values
    assert "sin f32[64,48]: absent -> P('data')" == str(change)


def test_collectives_that_repeat_are_counted() -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        return [function(x).sum(0) for function in (torch.sin, torch.cos)]

    machine = spmd.Machine(latency=0.0)
    gone, new = planned(machine=machine).diff(planned(function=twice, machine=machine)).comms
    assert (1, 0, 0, 2) == (gone.before, gone.after, new.before, new.after)
    assert str(new).startswith(
        "+ 2 x all_reduce over data, 192 bytes: sum produces P(partial={'data': 'sum'}), the result"
    )


def test_long_lists_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd.inspect.questions.difference.SHOWN", 1)
    found = planned().diff(planned(P(), P(None, "data")))
    assert f"  and {len(found.values) - 1} more" in str(found)
