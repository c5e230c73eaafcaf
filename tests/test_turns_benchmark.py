"""The benchmark of two versions in turns: its verdicts, and that each process has the package of its tree."""

import subprocess

import pytest

import turns
from turns import Turns

CASES = """
import time
import spmd

def busy():
    end = time.process_time() + spmd.SECONDS
    while time.process_time() < end:
        pass

CASES = {"busy": lambda: busy, "idle": lambda: lambda: None}
"""


class Recorded:
    """A timer that has its answers ready."""

    def __init__(self, log, label, seconds):
        self.log, self.label, self.left = log, label, list(seconds)

    def seconds(self, module, name):
        self.log.append(self.label)
        return self.left.pop(0)


def tree(folder, seconds):
    (folder / "spmd").mkdir(parents=True)
    (folder / "spmd" / "__init__.py").write_text(f"SECONDS = {seconds}")
    (folder / "made_cases.py").write_text(CASES)
    return folder


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ((1.0, 1.03, 1.0), "at most"),
        ((1.0, 1.04, 1.0), "over"),
        ((1.0, 1.04, 1.05), "at most, by the noise"),
        ((1.05, 1.04, 1.0), "at most, by the noise"),
        ((1.05, 1.06, 1.0), "over"),
        ((1.0, 0.5, 1.0), "at most"),
    ],
)
def test_a_ratio_is_over_above_the_limit_and_the_noise(times, verdict):
    assert verdict == Turns("case", *times).verdict


def test_versions_take_turns_and_minima_count():
    log = []
    slow = [3.0, 2.0, 5.0, 2.5, 3.0, 3.0, 3.0]
    timers = [Recorded(log, "old", slow), Recorded(log, "new", slow[::-1]), Recorded(log, "again", [4.0] * 7)]
    assert Turns("module: case", 2.0, 2.0, 4.0) == turns.compare("module", "case", timers, rounds=1)  # at least seven
    assert ["old", "new", "again", "again", "new", "old"] * 3 + ["old", "new", "again"] == log


def test_what_is_above_the_limit_is_measured_again_and_minima_count(monkeypatch, tmp_path):
    times = {"quick": [(1.0, 1.0, 1.0)], "slow": [(1.0, 1.2, 1.0), (1.5, 1.0, 0.99)]}
    monkeypatch.setattr(turns, "compare", lambda module, name, *_: Turns(name, *times[name].pop(0)))
    monkeypatch.setattr(turns.Worker, "names", lambda self, module: list(times))
    found = turns.measure(tmp_path, tmp_path, ["made_cases"])
    assert [Turns("quick", 1.0, 1.0, 1.0), Turns("slow", 1.0, 1.0, 0.99)] == found


@pytest.mark.parametrize(("seconds", "status"), [(0.04, 1), (0.01, 0)])
def test_each_process_has_the_package_of_its_tree(seconds, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(turns, "STARTS", 1)
    old, new = tree(tmp_path / "old", 0.02), tree(tmp_path / "new", seconds)
    assert status == turns.main(["--old", str(old), "--new", str(new), "made_cases:busy"])
    printed = capsys.readouterr().out
    assert "made_cases: busy" in printed and "idle" not in printed and ("over" in printed) == bool(status)


def test_a_process_that_ends_says_which(tmp_path):
    message = r"The process that times .* ended at \('no_such_module', 'case'\)"
    with turns.workers([tree(tmp_path, 1)]) as (worker,), pytest.raises(RuntimeError, match=message):
        worker.seconds("no_such_module", "case")


def test_a_commit_is_checked_out_and_removed(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for text in ("old", "new"):
        (tmp_path / "file").write_text(text)
        for command in (["init", "--quiet"], ["add", "file"], ["commit", "--quiet", "--message", text]):
            subprocess.run([*git, *command], check=True)
    with turns.checkout("HEAD~1", tmp_path) as old, turns.checkout(str(tmp_path)) as new:
        assert ["old", "new"] == [(folder / "file").read_text() for folder in (old, new)]
    assert not old.exists()
    assert 1 == len(subprocess.check_output([*git, "worktree", "list"], text=True).splitlines())
