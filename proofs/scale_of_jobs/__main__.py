"""What a job of many gloo processes costs each of them: operations of the store, descriptors, and a failure.

    python -m proofs.scale_of_jobs                    # 8, 16, 32 and 64 processes; some minutes
    python -m proofs.scale_of_jobs --ranks 8 16

Each rank starts, takes the first step of a tiny model, saves it, rests, and then finds that the rank in the middle was
killed. The exit status is 1 if some rank does not name it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch

from proofs.page import write_section
from proofs.scale_of_jobs.measure import measure
from proofs.scale_of_jobs.report import markdown, summary, unnamed


def main() -> int:
    """Measure and print; 1 if a rank does not name the one that was killed."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.scale_of_jobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16, 32, 64], help="processes, multiples of 4")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this page")
    options = parser.parse_args()
    lives = {ranks: measure(ranks) for ranks in options.ranks}
    print(*summary(lives), sep="\n")
    if options.markdown:
        command = f"    python -m proofs.scale_of_jobs {shlex.join(sys.argv[1:])}"
        about = f"Written by\n\n{command}\n\ntorch {torch.__version__}.\n\n"
        write_section(options.markdown, "scale of jobs", about + markdown(lives))
    return int(bool(unnamed(lives)))


if __name__ == "__main__":
    raise SystemExit(main())
