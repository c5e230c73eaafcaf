"""The time that `import spmd` adds to torch's own import, in processor seconds of fresh interpreters.

The planner, the rules and the lowering are imported at the first plan; their time is printed, too.

python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

RUNS = 9
LIMIT = 0.25
"""Seconds that the import may add."""

PROGRAM = """
import time
start = time.process_time()
import torch
middle = time.process_time()
import spmd
end = time.process_time()
import spmd.api.programs.stages
print(middle - start, end - middle, time.process_time() - end)
"""


def measure() -> list[float]:
    """Seconds to import torch, to import spmd after it, and to import what the first plan needs after that."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return [float(seconds) for seconds in run.stdout.split()]


def main() -> int:
    """Print the medians; the exit status is 1 above the limit."""
    runs = [measure() for _ in range(RUNS)]
    torch_seconds, spmd_seconds, plan_seconds = (statistics.median(column) for column in zip(*runs, strict=True))
    ratio = spmd_seconds / torch_seconds
    print(
        f"import torch {torch_seconds:.2f} s, import spmd {spmd_seconds:.2f} s more ({ratio:.2f}x), at most {LIMIT} s; "
        f"the first plan imports {plan_seconds:.2f} s more"
    )
    return int(spmd_seconds > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
