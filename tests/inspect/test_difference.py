"""Differences of plans."""

from pathlib import Path
from typing import Any

import pytest
import torch

import spmd
from spmd import P
from spmd.inspect import Plan
from spmd.inspect.saving.document import unique_names
from spmd.plan_report import main

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


def test_machines_and_meshes_that_differ_are_named() -> None:
    text = str(planned().diff(planned(ranks=8, machine=spmd.Machine.preset("a100"))))
    assert "made for another mesh:\n  data=4\n  -> data=8\n" in text
    assert "made for another machine, so that seconds tell the machines apart as well:\n  default" in text
    assert "\n  -> " in text.partition("another machine")[2]


def unrelated(y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.tanh(y) * z.sum()


def test_programs_with_nothing_in_common_are_refused() -> None:
    with pytest.raises(spmd.PlanError) as caught:
        planned().diff(planned(function=unrelated))
    assert str(caught.value).startswith("The plans are of programs that have nothing in common")
    assert "the first has  x f32[64,32], w f32[32,48]" in str(caught.value)
    assert "the second has y f32[64,32], z f32[32,48]" in str(caught.value)


def test_saved_plans_are_compared_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = planned(), planned(P(), P(None, "data")), planned(function=unrelated)
    paths = [str(tmp_path / name) for name in ("first.json", "second.json", "other.json")]
    for plan, path in zip((first, second, other), paths, strict=True):
        plan.save(path)
    assert 0 == main(paths[:2])
    assert f"{first.diff(second)}\n" == capsys.readouterr().out
    assert 0 == main([paths[0], paths[0]])
    assert "The plans are the same.\n" == capsys.readouterr().out
    assert 1 == main([paths[0], paths[2]])
    assert "nothing in common" in capsys.readouterr().err


def test_values_are_those_of_the_program_also_where_a_plan_repeats_some() -> None:
    mesh = spmd.make_mesh({"data": 8}, runtime="abstract")

    def step(ws: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        def loss(ws: list[torch.Tensor]) -> torch.Tensor:
            y = x
            for w in ws:
                y = torch.relu(y @ w)
            return y.square().mean()

        return torch.func.grad(loss)(ws)

    args = [torch.empty(1024, 1024, device="meta")] * 4, torch.empty(4096, 1024, device="meta")
    free = spmd.jit(step, (P("data"), P("data")), P("data"), mesh=mesh).plan(*args)
    limit = free.memory.peak - 4 * 1024 * 1024
    tight = spmd.jit(step, (P("data"), P("data")), P("data"), mesh=mesh, memory_limit=limit).plan(*args)
    assert len(tight.graph.operations) > len(free.graph.operations)
    program = unique_names(free.request.graph)
    named = {f"{name} {value.meta}" for value, name in program.items()}
    assert {change.name for change in free.diff(tight).values} <= named


def test_a_plan_made_for_another_machine_says_so(tmp_path: Path) -> None:
    a100 = spmd.Machine.preset("a100")
    made = planned(machine=a100)
    made.save(tmp_path / "plan.json")
    assert "another machine" not in f"{made!r}{made}"
    kept = planned(plan=tmp_path / "plan.json")
    assert f"made for another machine, {a100}; here it is default, like an H100" in str(kept)
    assert "its figures are for the former" in str(kept)
    assert repr(kept).endswith(", made for another machine)")
    assert made.seconds == kept.seconds
    priced = planned(plan=tmp_path / "plan.json", machine=spmd.Machine.preset("h200"))
    assert "its figures are for the latter" in str(priced)
    assert made.seconds != priced.seconds
    same = planned(plan=tmp_path / "plan.json", machine=a100)
    assert "another machine" not in f"{same!r}{same}"
