"""The tests of ranks that go wrong, again and again beside busy processes.

    python -m proofs.faults_at_load                                 # 20 runs of all of them, beside 8 busy processes
    python -m proofs.faults_at_load --runs 5 --jobs 4 tests/job     # 5 runs of some, 4 of them at a time
    python -m proofs.faults_at_load --runs 0 --markdown proofs/reports/faults.md    # the table of all runs so far

Each run is added to the record, from which the table is made. The exit status is 1 if a test has failed.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from proofs.faults_at_load.load import busy_processes
from proofs.faults_at_load.report import failures, markdown
from proofs.faults_at_load.runs import Run, append, read, run_tests
from proofs.page import write_section

RECORD = Path("build/faults_at_load.jsonl")


def main() -> int:
    """Run, record and print; 1 if a test has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.faults_at_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tests", nargs="*", default=["tests"], help="files, folders or names of tests")
    parser.add_argument("-k", dest="chosen", default="", metavar="EXPRESSION", help="as for pytest")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--load", type=int, default=8, help="busy processes beside the tests")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, which add to the load")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this page")
    options = parser.parse_args()

    def run(_: int) -> Run:
        chosen = ["-m", "faults", "-k", options.chosen, *options.tests]
        done = run_tests(chosen, options.load, options.record.with_suffix(""))
        append(done, options.record)
        return done

    with busy_processes(options.load if options.runs else 0), ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(run, range(options.runs)))
    recorded = read(options.record)
    print(*failures(done), markdown(recorded), sep="\n")
    if options.markdown:
        about = f"torch {torch.__version__}, Python {sys.version.split()[0]}.\n\n"
        write_section(options.markdown, "faults at load", about + markdown(recorded))
    return int(any(each.errors for each in done))


if __name__ == "__main__":
    raise SystemExit(main())
