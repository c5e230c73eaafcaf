"""Memory that is freed by one step is there for the next, without page faults."""

import subprocess
import sys

import pytest

from spmd.job.host_memory import keep_freed_memory

STEPS = """
import resource, torch
from spmd.job.host_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = min(faults() for _ in range(10))
kept = keep_freed_memory({})
print(kept, first, min(faults() for _ in range(10)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_freed_memory_is_kept() -> None:
    found = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    kept, before, after = found.stdout.split()
    assert kept == "True"
    assert int(before) > 10_000  # 48 MB are 11,700 pages
    assert int(after) < 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name: str) -> None:
    assert not keep_freed_memory({name: "1"})
