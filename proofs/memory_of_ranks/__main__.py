"""What gloo processes hold while they run a program, compared with `plan.memory`.

    python -m proofs.memory_of_ranks                                      # all programs; some minutes
    python -m proofs.memory_of_ranks 'gpt fsdp$' --ranks 2 --sizes even   # one case: some seconds
    python -m proofs.memory_of_ranks 'gathers$' --ranks 2 --held          # and what plan and rank hold at their peaks
    python -m proofs.memory_of_ranks fsdp --limits 0.6 0.4                # under parts of the peak without a limit

A program is right if no rank holds more than the plan says, and some rank at least 90% of it. The exit status is 1 if
one is not. A limit must be met, or refused with the smallest peak that is possible, which must then be met. The
allocator's figures include buffers inside kernels and inside gloo, of which a plan does not speak.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would say when it starts and stops

import torch

import spmd
from proofs.memory_of_ranks.programs import PROGRAMS
from proofs.memory_of_ranks.ranks import Task, rows_of
from proofs.memory_of_ranks.report import markdown, summary
from proofs.page import write_section

SIZES = ("even", "uneven")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.memory_of_ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", nargs="?", default="", help="a pattern that names have in them")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="processes of a job")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--limits", nargs="+", type=float, default=[], help="parts of the peak without a limit")
    parser.add_argument("--held", action="store_true", help="what is held at the peak")
    parser.add_argument("--list", action="store_true", help="print the names of the programs, and end")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this page")
    return parser.parse_args()


def main() -> int:
    """Measure and print; 1 if a case is wrong."""
    options = arguments()
    names = [name for name in PROGRAMS if re.search(options.program, name)]
    if options.list or not names:
        print(*PROGRAMS, sep="\n")
        return int(not options.list)
    tasks = [Task(name, size == "even", tuple(options.limits)) for name in names for size in options.sizes]
    start, rows = time.monotonic(), []
    for ranks in options.ranks:
        rows += spmd.launch(rows_of, ranks, tasks, options.held)
    print(*summary(rows), f"{time.monotonic() - start:,.0f} s", sep="\n")
    if options.markdown:
        command = f"    python -m proofs.memory_of_ranks {shlex.join(sys.argv[1:])}"
        about = f"Written by\n\n{command}\n\ntorch {torch.__version__}.\n\n"
        name = "memory of ranks under limits" if options.limits else "memory of ranks"
        write_section(options.markdown, name, about + markdown(rows))
    return int(any(row.verdict for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
