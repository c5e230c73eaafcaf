"""Random programs with repeated layers: plans of the folded search beside those of the search of every layer.

    python -m proofs.repeated_layers --seeds 0:300 --jobs 1     # about a second each
    python -m proofs.repeated_layers --seeds 17                 # one program, and where its plans differ

Both plans run on virtual ranks and are compared with one device. The exit status is 1 after an error: values that are
wrong, a crash, a hang, or a program that one search alone refuses.
"""

from __future__ import annotations

import argparse
import functools
import time

import torch

from proofs.pool import Lost, each
from proofs.repeated_layers.compare import ERRORS, Compared, Verdict, compare
from proofs.repeated_layers.report import differs, line, summary


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
    parser.add_argument("--plans", action="store_true", help="compare the plans, and do not run them")
    options = parser.parse_args()
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    torch.set_num_threads(1)
    start, found = time.monotonic(), []
    work = functools.partial(compare, runs=not options.plans)
    for seed, result in each(seeds, work, jobs=options.jobs, seconds=options.seconds):
        found.append(_lost(seed, result) if isinstance(result, Lost) else result)
        if differs(found[-1]):
            print(line(found[-1]), flush=True)
    print(*summary(sorted(found, key=lambda each: each.seed)), sep="\n")
    print(f"seeds {seeds.start}:{seeds.stop}, {time.monotonic() - start:,.0f} s")
    return int(any(one.verdict in ERRORS for one in found))


def _lost(seed: int, lost: Lost) -> Compared:
    """The result of a program whose process ended or was stopped."""
    if lost.exitcode is None:
        return Compared(seed, "", Verdict.HANG)
    return Compared(seed, "", Verdict.CRASH, f"the process ended with {lost.exitcode}")


if __name__ == "__main__":
    raise SystemExit(main())
