import os
import subprocess
import sys
from pathlib import Path

import distributed_cases as cases
import pytest

from spmd.errors import MeshError, SpmdError
from spmd.job.launch import launch

ROOT = Path(__file__).parents[2]


def test_ranks_make_a_mesh_and_rank_0_answers():
    assert 3.0 == launch(cases.total_of_ranks, 2, 3.0)


def test_the_first_traceback_is_the_error():
    with pytest.raises(SpmdError, match=r"(?s)Rank 1 of 2 failed in fail_on_rank_one:.*what rank 1 could not do"):
        launch(cases.fail_on_rank_one, 2)


@pytest.mark.slow  # tests/job/test_faults.py has a fast one
def test_a_rank_that_is_killed_is_the_error():
    with pytest.raises(SpmdError, match=r"Rank 1 of 2 failed in die_on_rank_one:\nSignal 9 \(SIGKILL\) received"):
        launch(cases.die_on_rank_one, 2)


def run_in_notebook(code):
    """As a notebook, say: functions of its own are called in forks."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert run.stdout, run.stderr
    return run


def printed_by(code):
    return run_in_notebook(code).stdout


def test_a_function_of_a_notebook_is_distributed():
    code = "import spmd\ndef f(x):\n    return spmd.process_count() * x\nprint(spmd.launch(f, 2, 21))"
    assert "42\n" == printed_by(code)


FAILS_FIRST = """
import spmd

def f():
    if spmd.process_index() == 1:
        raise OSError("no such file")
    spmd.make_mesh({"x": 2})

try:
    spmd.launch(f, 2)
except spmd.SpmdError as error:
    print(error)
"""


@pytest.mark.faults
def test_a_function_of_a_notebook_may_fail_before_there_is_a_mesh():
    """The rank that waits for the others ends when it is told to, and not when the launcher's patience is over."""
    run = run_in_notebook(FAILS_FIRST)
    assert "OSError: no such file" in run.stdout
    assert "SIGTERM" in run.stderr and "SIGKILL" not in run.stderr


ENDED = """
import pathlib, torch, spmd

def names_of_threads():
    mesh = spmd.make_mesh({"x": 2})
    step = spmd.jit(lambda x: x - x.sum(), spmd.P("x"), spmd.P("x"), mesh=mesh)
    spmd.checkpoint.save({"x": step(torch.ones(4))}, "FOLDER")
    torch.distributed.destroy_process_group()
    return [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]

print(spmd.launch(names_of_threads, 2))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux lists threads there")
def test_no_thread_of_a_job_outlives_it(tmp_path):
    """One that lets go of a tensor while the interpreter ends would abort the process."""
    names = printed_by(ENDED.replace("FOLDER", str(tmp_path / "checkpoint")))
    assert "python" in names and "gloo" not in names


@pytest.mark.parametrize("count", [0, -1, "2"])
def test_a_number_of_processes_is_positive(count):
    with pytest.raises(MeshError, match="positive number of processes"):
        launch(max, count)


def test_jobs_do_not_nest(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(MeshError, match="in a process of a distributed job"):
        launch(max, 2, 1, 2)
