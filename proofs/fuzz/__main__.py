"""`python -m proofs.fuzz --seeds 0:1000`: random whole programs on virtual ranks, against one device."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from proofs.fuzz.batches import check_apart, check_seeds
from proofs.fuzz.check import check, check_seed
from proofs.fuzz.generate import generate
from proofs.fuzz.outcome import BAD, Outcome, Status
from proofs.fuzz.outside import check_outside
from proofs.fuzz.program import default_dtype
from proofs.fuzz.report import show
from proofs.fuzz.shrink import shrink


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proofs.fuzz", description=__doc__)
    parser.add_argument("--seeds", default="0:200", help="programs to run, as 0:20000")
    parser.add_argument("--seed", type=int, help="run one program and print its source")
    parser.add_argument("--shrink", action="store_true", help="with --seed: make a failing program as short as can be")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for one program")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    parser.add_argument("--stop-after", type=int, default=0, help="stop after so many failures")
    parser.add_argument("--outside", action="store_true", help="transforms act from outside of jit, on DTensors")
    parser.add_argument("--avoid", default="", help="operators and transforms, as as_strided,linearize: not run")
    return parser.parse_args()


def main() -> int:
    """Run programs; 1 if any fails."""
    options = _arguments()
    if options.seed is not None:
        return _one(options)
    first, last = map(int, options.seeds.split(":"))
    outcomes = _many(range(first, last), options)
    console = Console()
    show(outcomes, console)
    if options.json:
        options.json.write_text(json.dumps([outcome.data() for outcome in outcomes], indent=0) + "\n")
    return int(any(outcome.status in BAD for outcome in outcomes))


def _many(seeds: range, options: argparse.Namespace) -> list[Outcome]:
    check_seed(seeds.start)  # fills caches before the fork
    outcomes: list[Outcome] = []
    failures = 0
    start = time.monotonic()
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
        task = progress.add_task("programs", total=len(seeds))
        avoid = frozenset(options.avoid.split(",")) - {""}
        run = check_outside if options.outside else check
        for outcome in check_seeds(seeds, jobs=options.jobs, seconds=options.seconds, avoid=avoid, run=run):
            outcomes.append(outcome)
            progress.update(task, advance=1)
            if outcome.status in BAD:
                failures += 1
                progress.console.print(
                    f"{outcome.seed}: {outcome.status.value}: {outcome.message:.200}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            if options.stop_after and failures >= options.stop_after:
                break
    Console().print(f"seeds {seeds.start}:{seeds.stop}, {time.monotonic() - start:,.0f} s")
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def _one(options: argparse.Namespace) -> int:
    with default_dtype():
        program = generate(options.seed)
    if options.shrink:
        with default_dtype():
            program = shrink(program, lambda candidate: check_apart(candidate, options.seconds))
        print(program.source())
        found = check_apart(program, options.seconds)
        print(f"# {found.status.value}: {found.message}" if found else "# refused by torch")
        return 1
    print(program.source())
    run = check_outside if options.outside else check
    outcome = next(check_seeds([options.seed], jobs=1, seconds=options.seconds, run=run))
    print(f"# {outcome.status.value}: {outcome.message}")
    return int(outcome.status is not Status.RIGHT)


if __name__ == "__main__":
    raise SystemExit(main())
