"""`python -m proofs.shard_map_fuzz 0:1000`: random shard_map programs on virtual ranks, against a loop over ranks."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.progress import track

from proofs.fuzz.batches import check_seeds
from proofs.fuzz.outcome import BAD, Outcome, Status
from proofs.shard_map_fuzz.check import check_seed, script
from proofs.shard_map_fuzz.generate import generate
from proofs.shard_map_fuzz.shrink import shrink


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proofs.shard_map_fuzz", description=__doc__)
    parser.add_argument("seeds", help="programs to run, as 0:10000 or random:10000, or one of them, as 137")
    parser.add_argument("--shrink", action="store_true", help="of one program that fails, print a shorter one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=120.0, help="time for one program")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    return parser.parse_args()


def main() -> int:
    """Run programs; 1 if any fails."""
    options = _arguments()
    if ":" not in options.seeds:
        return _one(int(options.seeds), options.shrink)
    seeds = _range(options.seeds)
    start = time.monotonic()
    check_seed(seeds.start)  # fills caches before the fork
    found = check_seeds(seeds, jobs=options.jobs, seconds=options.seconds, check_one=check_seed)
    outcomes = list(track(found, "programs", total=len(seeds)))
    if options.json:
        options.json.write_text(json.dumps([outcome.data() for outcome in outcomes], indent=0) + "\n")
    for outcome in outcomes:
        if outcome.status in BAD:
            print(
                f"# seed {outcome.seed}: {outcome.status.value}: {outcome.message}\n{script(generate(outcome.seed))}\n"
            )
    for line in summary(outcomes):
        print(line)
    print(f"seeds {seeds.start}:{seeds.stop}, {time.monotonic() - start:,.0f} s")
    return int(any(outcome.status in BAD for outcome in outcomes))


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    if first != "random":
        return range(int(first), int(last))
    start = random.SystemRandom().randrange(10**9)
    return range(start, start + int(last))


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The counts of a run, as lines of text: statuses, what programs have, reasons of refusals."""
    statuses = Counter(outcome.status for outcome in outcomes)
    yield f"{len(outcomes)} programs: " + ", ".join(f"{statuses[status]} {status.value}" for status in Status)
    checked = [outcome for outcome in outcomes if outcome.status is not Status.SKIPPED]
    made = Counter(name for outcome in checked for name in (outcome.transform, *outcome.operators))
    yield "with " + ", ".join(f"{name} {count}" for name, count in sorted(made.items()))
    yield f"{sum(outcome.collectives for outcome in outcomes)} collectives ran"
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status is not Status.RIGHT:
            kinds[outcome.status.value, outcome.kind].append(outcome.seed)
    for (status, kind), seeds in sorted(kinds.items(), key=lambda item: -len(item[1])):
        yield f"{len(seeds):5} {status}: {kind} (seeds {', '.join(map(str, seeds[:8]))})"


def _one(seed: int, shorter: bool) -> int:
    outcome = check_seed(seed)
    program = generate(seed)
    if shorter and outcome.status is not Status.RIGHT:
        program = shrink(program)
        outcome = check_seed(seed, program=program)
    print(script(program))
    print(f"# {outcome.status.value}: {outcome.message}")
    return int(outcome.status in BAD)


if __name__ == "__main__":
    raise SystemExit(main())
