"""Random programs with repeated layers: plans of the folded search beside those of the search of every layer.

    python -m proofs.repeated_layers --seeds 0:300 --jobs 1     # about a second each
    python -m proofs.repeated_layers --seeds 17                 # one program, and where its plans differ
    python -m proofs.repeated_layers --seeds 0:0 --tied 100     # small ones, beside the optimum with tied layers
    python -m proofs.repeated_layers --seeds 0:84 --stock       # stock models of transformers with six layers

Both plans run on virtual ranks and are compared with one device. The exit status is 1 after an error: values that are
wrong, a crash, a hang, a program that one search alone refuses, or a small one with a plan below the optimum.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch

from proofs.pool import Lost, each
from proofs.repeated_layers import report, tied
from proofs.repeated_layers.compare import ERRORS, Compared, Verdict, compare, difference_of


def main() -> int:
    """Compare and print; 1 after an error."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.repeated_layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default="0:300", help="programs, as 0:300, or one of them, as 17")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for one program")
    parser.add_argument("--tied", type=int, default=0, help="so many small programs, beside optima by HiGHS")
    parser.add_argument("--plans", action="store_true", help="compare the plans, and do not run them")
    parser.add_argument("--stock", action="store_true", help="compare plans of stock models instead of random programs")
    options = parser.parse_args()
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    torch.set_num_threads(1)
    start = time.monotonic()
    bad = _programs(seeds, options) + _small(options)
    print(f"{time.monotonic() - start:,.0f} s")
    return int(bad > 0)


def _programs(seeds: range, options: argparse.Namespace) -> int:
    """The number of errors in programs planned by both searches."""
    found = []
    work: Callable[[int], Compared] = functools.partial(compare, runs=not options.plans)
    if options.stock:
        from proofs.repeated_layers.stock import stock  # needs transformers

        work = functools.partial(compare, runs=False, make=stock)
    for seed, result in each(seeds, work, jobs=options.jobs, seconds=options.seconds):
        found.append(_lost(seed, result) if isinstance(result, Lost) else result)
        if report.differs(found[-1]) or len(seeds) == 1:
            print(report.line(found[-1]), flush=True)
    if len(found) == 1 and found[0].whole and found[0].folded:
        print(difference_of(seeds.start))
    if found:
        print(*report.summary(sorted(found, key=lambda one: one.seed)), f"seeds {seeds.start}:{seeds.stop}", sep="\n")
    return sum(one.verdict in ERRORS for one in found)


def _lost(seed: int, lost: Lost) -> Compared:
    """The result of a program whose process ended or was stopped."""
    if lost.exitcode is None:
        return Compared(seed, "", Verdict.HANG)
    return Compared(seed, "", Verdict.CRASH, f"the process ended with {lost.exitcode}")


def _small(options: argparse.Namespace) -> int:
    """The number of mistakes in plans of small programs."""
    found, lost = [], 0
    for seed, result in each(range(options.tied), tied.optima, jobs=options.jobs, seconds=options.seconds):
        if isinstance(result, Lost):
            lost += 1
            print(f"tied {seed}: no optimum", flush=True)
            continue
        found.append(result)
        if tied.differs(result):
            print(tied.line(result), flush=True)
    if options.tied:
        print(*tied.summary(found), sep="\n")
    return lost + sum(bool(one.mistake) for one in found)


if __name__ == "__main__":
    raise SystemExit(main())
