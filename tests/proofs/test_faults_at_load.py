"""The tool that runs tests beside busy processes, on small tests of its own."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proofs.faults_at_load.load import busy_processes, measured_load
from proofs.faults_at_load.report import failures, markdown
from proofs.faults_at_load.runs import append, read, run_tests

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): raise OSError("no such file")
def test_is_skipped(): pytest.skip("why not")

@pytest.fixture
def broken(): raise OSError("no such folder")

def test_of_a_fixture(broken): pass
"""


@pytest.fixture
def tests(tmp_path):
    file = tmp_path / "test_small.py"
    file.write_text(TESTS)
    return file


def test_what_becomes_of_tests_is_recorded(tests, tmp_path):
    record = tmp_path / "folder" / "record.jsonl"
    run = run_tests([str(tests), f"--rootdir={tests.parent}"], busy=3, logs=tmp_path / "logs")
    append(run, record)
    assert [run] == read(record)
    outcomes = {f"{tests.name}::{name}": outcome for name, outcome in OUTCOMES.items()}
    assert (outcomes, 3) == (run.tests, run.busy)
    assert ["OSError: no such file", "OSError: no such folder"] == [
        re.search("OSError: [a-z ]+", text).group() for text in run.errors.values()
    ]
    (first, second) = failures([run])
    assert first.startswith("test_small.py::test_fails, at a load of ") and "no such folder" in second
    assert "| `test_small.py` | 3 | 1 | 2 | 0 |" in markdown([run])


OUTCOMES = {"test_passes": "passed", "test_fails": "failed", "test_of_a_fixture": "failed"}


def test_tests_that_cannot_run_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)ended with status 4.*nowhere"):
        run_tests([str(tmp_path / "nowhere.py")], busy=0, logs=tmp_path)


def test_busy_processes_are_counted_and_end():
    with busy_processes(3), measured_load() as load:
        time.sleep(2.5)
    assert 2 <= len(load.samples) and 3 <= min(load.samples)


ROOT = Path(__file__).parents[2]

ABANDONS = """
import os
from proofs.faults_at_load.load import busy_processes

busy = busy_processes(1)
busy.__enter__()
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
os.kill(os.getpid(), 9)
"""


def test_busy_processes_end_with_who_started_them():
    died = subprocess.run([sys.executable, "-c", ABANDONS], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    (child,) = died.stdout.split()
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
