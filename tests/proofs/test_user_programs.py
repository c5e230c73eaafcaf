"""Scripts as people write them, run twice in one namespace: a sample, and that the check sees what is wrong."""

import attrs
import pytest
import torch

from proofs.user_programs import check
from proofs.user_programs.__main__ import row
from proofs.user_programs.check import Report, Run

QUICK = ("mean", "lora", "optimizer_rate", "cells")  # each runs twice, in processes of its own
RUN = Run([torch.ones(2), 1.0], (1, 2), 100, 0.1, 0.01, ())


@pytest.mark.parametrize("name", QUICK)
def test_scripts_make_few_programs_and_nothing_is_stale(name):
    assert [] == check.check(name).problems()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in (*check.SCRIPTS, check.GET_STARTED) if name not in QUICK])
def test_all_scripts_make_few_programs_and_nothing_is_stale(name):
    if name == check.GET_STARTED:
        pytest.importorskip("transformers")
    assert [] == check.check(name).problems()


def test_the_check_finds_nothing_wrong_with_equal_runs():
    report = Report("made", [RUN, RUN], [RUN, RUN])
    assert [] == report.problems()
    assert ["made", "1+2 1+2", "0 0", "0.10 0.10", "10.00/10.00 10.00/10.00", "", ""] == row(report)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"results": [torch.tensor([1.0, 1.1]), 1.0]}, "run 2: result 0 of 2 differs from one device's"),
        ({"results": [torch.ones(2)]}, "run 2: result 1 of 2 differs from one device's"),
        ({"programs": (1, 3)}, "run 2: 3 programs of a function, at most 2 expected"),
        ({"live": 100_000}, "the second run adds 99,892 bytes of tensors"),
    ],
)
def test_the_check_sees_what_is_wrong(change, problem):
    assert [problem] == Report("made", [RUN, attrs.evolve(RUN, **change)], [RUN, RUN]).problems()


def test_scripts_see_their_own_globals_and_one_device_has_no_programs(tmp_path, monkeypatch):
    script = tmp_path / "made.py"
    script.write_text("import spmd\nf = spmd.jit(lambda x: x * scale)\nscale = 2\nresults = [f(1), f(2)]\n")
    monkeypatch.setitem(check.SCRIPTS, "made", script)
    found = check.run("made", {}, check._on_one_device)
    assert [[2, 4], (0,)] == [found.results, found.programs]
