"""The time that `import spmd` adds to torch's own import, in processor seconds of fresh interpreters.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 9
LIMIT = 0.3
"""Seconds that the import may add."""

PROGRAM = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import spmd
print(middle - start, time.process_time() - middle)
"""


def measure() -> tuple[float, float]:
    """Seconds to import torch, and to import spmd after it."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    torch_seconds, spmd_seconds = map(float, run.stdout.split())
    return torch_seconds, spmd_seconds


def main() -> int:
    """Print the medians; the exit status is 1 above the limit."""
    runs = [measure() for _ in range(RUNS)]
    torch_seconds, spmd_seconds = (statistics.median(column) for column in zip(*runs, strict=True))
    ratio = spmd_seconds / torch_seconds
    print(
        f"import torch {torch_seconds:.2f} s, import spmd {spmd_seconds:.2f} s more ({ratio:.2f}x), at most {LIMIT} s"
    )
    return int(spmd_seconds > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
