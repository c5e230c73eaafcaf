import os
import subprocess
import sys
from pathlib import Path

import distributed_cases as cases
import pytest

from spmd.errors import MeshError, SpmdError
from spmd.launch import launch

ROOT = Path(__file__).parents[1]


def test_ranks_make_a_mesh_and_rank_0_answers():
    assert 3.0 == launch(cases.total_of_ranks, 2, 3.0)


def test_the_first_traceback_is_the_error():
    with pytest.raises(SpmdError, match=r"(?s)Rank 1 of 2 failed in fail_on_rank_one:.*what rank 1 could not do"):
        launch(cases.fail_on_rank_one, 2)


def test_a_rank_that_is_killed_is_the_error():
    with pytest.raises(SpmdError, match=r"Rank 1 of 2 failed in die_on_rank_one:\nSignal 9 \(SIGKILL\) received"):
        launch(cases.die_on_rank_one, 2)


def test_a_function_of_a_notebook_is_distributed():
    code = "import spmd\ndef f(x):\n    return spmd.process_count() * x\nprint(spmd.launch(f, 2, 21))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "42\n" == run.stdout, run.stderr


@pytest.mark.parametrize("count", [0, -1, "2"])
def test_a_number_of_processes_is_positive(count):
    with pytest.raises(MeshError, match="positive number of processes"):
        launch(max, count)


def test_jobs_do_not_nest(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(MeshError, match="in a process of a distributed job"):
        launch(max, 2, 1, 2)
