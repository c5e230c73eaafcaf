"""`python -m proofs.fuzz.mutants --seeds 0:500`: how many programs it takes to find each mutant."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from proofs.fuzz.batches import check_seeds
from proofs.fuzz.check import check_seed, known_program
from proofs.fuzz.mutants import MUTANTS
from proofs.fuzz.mutants.report import page, show
from proofs.fuzz.mutants.search import Finding, find
from proofs.fuzz.outcome import Outcome, Status
from proofs.page import write_section


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proofs.fuzz.mutants", description=__doc__)
    parser.add_argument("--seeds", default="0:500", help="programs to run, as 0:500")
    parser.add_argument("--mutant", action="append", choices=MUTANTS, help="one mutant; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for one program")
    parser.add_argument(
        "--unbroken", type=Path, help="outcomes of the fuzz itself, from its --json, to spare running it"
    )
    parser.add_argument(
        "--json", type=Path, help="write findings to this file; those that it has are not searched again"
    )
    parser.add_argument("--markdown", type=Path, help="write the table to this page")
    return parser.parse_args()


def main() -> int:
    """Search for mutants; 1 if any is not found."""
    options = _arguments()
    seeds = range(*map(int, options.seeds.split(":")))
    check_seed(seeds.start)  # fills caches before the fork
    unbroken = _unbroken(seeds, options)
    for outcome in track(unbroken, "programs generated"):  # before the fork, so that all processes have the programs
        if outcome.status is Status.RIGHT:
            known_program(outcome.seed)
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    found = {finding.mutant: finding for finding in map(Finding.of, known)}
    for name in track(options.mutant or list(MUTANTS), "mutants"):
        if name in found:
            continue
        found[name] = find(MUTANTS[name], unbroken, jobs=options.jobs, seconds=options.seconds)
        if options.json:
            _write(options.json, found.values())
    found = {name: found[name] for name in MUTANTS if name in found}
    show(found, Console())
    if options.markdown:
        write_section(options.markdown, "mutants", page(found, seeds))
    return int(any(not finding.programs for finding in found.values()))


def _unbroken(seeds: range, options: argparse.Namespace) -> list[Outcome]:
    if options.unbroken:
        known = map(Outcome.of, json.loads(options.unbroken.read_text()))
        outcomes: Iterable[Outcome] = (outcome for outcome in known if outcome.seed in seeds)
    else:
        checked = check_seeds(seeds, jobs=options.jobs, seconds=options.seconds)
        outcomes = track(checked, "programs unbroken", total=len(seeds))
    return sorted(outcomes, key=lambda outcome: outcome.seed)


def _write(file: Path, found: Iterable[Finding]) -> None:
    file.write_text(json.dumps([finding.data() for finding in found], indent=0) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
