"""The limit of open files of the process that keeps the store of torch.distributed."""

import os
import subprocess
import sys

import pytest

from spmd.testing.local_job import local_job

START = """
import resource
from spmd.job import process

resource.setrlimit(resource.RLIMIT_NOFILE, (256, HIGHEST))
try:
    process.init(timeout=1)
except process.SpmdError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("highest", "message", "limit"),
    [
        (700, "Rank 0 keeps the store of torch.distributed and needs about 768 open files (the limit is 700).", 256),
        (800, "Only 1 of 64 processes started", 768),
    ],
)
def test_rank_0_raises_its_limit_or_says_that_it_may_not(highest, message, limit):
    job = {**local_job(64), "RANK": "0"}
    run = subprocess.run(
        [sys.executable, "-c", START.replace("HIGHEST", str(highest))],
        env={**os.environ, **job, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert message in run.stdout, run.stderr
    assert f"({limit}, {highest})\n" in run.stdout
