"""Plans of random small programs with loops, beside the optimum of the unrolled programs, all trips sharded alike.

    python -m proofs.tied_loops            # seeds 0 to 200: some minutes
    python -m proofs.tied_loops 3 17

The exit status is 1 if a plan is farther from the optimum than it says; one that is exact says that it is the optimum.
"""

from __future__ import annotations

import argparse

from proofs.tied_loops.optimum import NEAR, optima
from proofs.tied_loops.programs import drawn


def main() -> int:
    """Compare and print; 1 if a plan is not the optimum."""
    parser = argparse.ArgumentParser(
        prog="python -m proofs.tied_loops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", nargs="*", type=int, help="of programs")
    seeds = parser.parse_args().seeds or range(200)
    exact, optimal, wrong = 0, 0, 0
    for seed in seeds:
        plan = drawn(seed).plan()
        found = optima(plan.request)
        exact += plan.exact
        optimal += found.distance <= NEAR
        wrong += found.distance > NEAR + plan.gap
        if found.distance > NEAR:
            print(f"seed {seed}: planned {found.planned:.6g} s, the optimum is {found.tied:.6g} s, gap {plan.gap:.3g}")
    print(f"{len(seeds)} plans, of which {optimal} are the optimum, and {exact} say so; {wrong} are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
