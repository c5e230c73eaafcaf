"""A save in the background that fails: the error reaches the user on every rank, at the latest by the exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import checkpoint_cases as cases
import pytest
import unwaited_save
from sampling import sample

import spmd
from spmd import P, SpmdError
from spmd.checkpoint import exists, load
from spmd.job.launch import launch
from spmd.testing.local_job import local_job

pytestmark = pytest.mark.faults

RANKS = 2
PATHS = os.pathsep.join([str(Path(spmd.__file__).parents[1]), *sys.path])
FAILED = r"CheckpointError: Saving to \S+ failed: rank 1: OSError: "


def run_script(folder, full_on, status):
    """The exit status, output and errors of each rank of `unwaited_save.py`."""
    job = {**local_job(RANKS), "PYTHONPATH": PATHS}
    command = [sys.executable, unwaited_save.__file__, str(folder), str(full_on), str(status)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **job, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("status", sample([0, 3], [3]))
def test_ranks_that_end_without_waiting_for_a_failed_save_fail(tmp_path, status):
    for code, output, errors in run_script(tmp_path / "run", 1, status):
        assert (120, "the end of the script\n") == (code, output), errors
        assert re.search(r"in the background has failed, and so does this process:\n", errors), errors
        assert re.search(FAILED + r"\[Errno 27\] File too large\n$", errors), errors
    assert not exists(tmp_path / "run")


def test_ranks_that_end_without_waiting_for_a_sound_save_do_not(tmp_path):
    assert [(0, "the end of the script\n", "")] * RANKS == run_script(tmp_path / "run", -1, 0)
    mesh = spmd.make_mesh({"data": 3}, runtime="virtual")
    assert 200_000 == load(tmp_path / "run", {"x": P("data")}, mesh=mesh)["x"].full_tensor().sum()


CHILD = """
import multiprocessing, sys, unwaited_save

child = multiprocessing.get_context(sys.argv[1]).Process(target=unwaited_save.save_alone, args=(sys.argv[2],))
child.start()
child.join()
print(child.exitcode)
"""


@pytest.mark.parametrize("method", sample(["fork", "forkserver", "spawn"], ["forkserver"]))  # each starts processes
def test_a_process_of_multiprocessing_fails_with_its_save(tmp_path, method):
    run = subprocess.run(
        [sys.executable, "-c", CHILD, method, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
        timeout=300,
    )
    assert "120\n" == run.stdout, run.stderr
    assert 1 == run.stderr.count("in the background has failed, and so does this process:\n"), run.stderr
    assert "File too large" in run.stderr


def test_launch_raises_the_error_of_a_save_that_nobody_waited_for(tmp_path):
    with pytest.raises(SpmdError, match=rf"(?s)Rank \d of 2 failed in save_unwaited:.*{FAILED}"):
        launch(unwaited_save.save_unwaited, RANKS, str(tmp_path / "run"), 1)


def test_an_error_in_the_background_is_raised_on_all_ranks_by_what_comes_next(workers, tmp_path):
    for found in workers.run(cases.errors_in_the_background, str(tmp_path / "run"), ranks=RANKS):
        assert ["wait", "save", "save_async", "load"] == list(found)
        for error in found.values():
            assert re.match(FAILED + "no space left on device", error), error
