"""`python -m proofs.shard_map_fuzz.search`: by which program each mutant is found."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.progress import track

from proofs.fuzz.batches import check_seeds
from proofs.fuzz.mutants.search import Finding, find
from proofs.fuzz.outcome import Outcome
from proofs.page import table, write_section
from proofs.shard_map_fuzz.check import check_seed
from proofs.shard_map_fuzz.mutants import FAMILIES, MUTANTS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proofs.shard_map_fuzz.search", description=__doc__)
    parser.add_argument("--seeds", default="0:500", help="programs to run, in order")
    parser.add_argument("--mutant", action="append", help="a mutant by name; may be given several times; default all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--unbroken", type=Path, help="outcomes of these programs, as --json of the fuzz wrote them")
    parser.add_argument("--json", type=Path, help="write findings to this file; those that it has are kept")
    parser.add_argument("--markdown", type=Path, help="write the table to this page")
    return parser.parse_args()


def main() -> int:
    """Search for mutants; 1 if any is not found."""
    options = _arguments()
    seeds = range(*map(int, options.seeds.split(":")))
    unbroken = _unbroken(seeds, options)
    known = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    found = {finding.mutant: finding for finding in map(Finding.of, known)}
    for name in track(options.mutant or list(MUTANTS), "mutants"):
        if name not in found:
            found[name] = search(name, unbroken, options.jobs)
            if options.json:
                options.json.write_text(json.dumps([one.data() for one in found.values()], indent=0) + "\n")
        print(f"{name}: {found[name].programs or f'none of {found[name].concerned}'}", flush=True)
    if options.markdown:
        write_section(
            options.markdown, "mutants", page({name: found[name] for name in MUTANTS if name in found}, seeds)
        )
    return int(any(not finding.programs for finding in found.values()))


def search(name: str, unbroken: list[Outcome], jobs: int = 1) -> Finding:
    """How many programs it takes to find a mutant; `unbroken` are their outcomes in the package as it is."""
    return find(MUTANTS[name], unbroken, jobs=jobs, known=lambda seed: None, check_one=check_seed)


def _unbroken(seeds: range, options: argparse.Namespace) -> list[Outcome]:
    if options.unbroken:
        known = map(Outcome.of, json.loads(options.unbroken.read_text()))
        return sorted((outcome for outcome in known if outcome.seed in seeds), key=lambda outcome: outcome.seed)
    checked = check_seeds(seeds, jobs=options.jobs, seconds=120.0, check_one=check_seed)
    return sorted(track(checked, "programs unbroken", total=len(seeds)), key=lambda outcome: outcome.seed)


def page(found: Mapping[str, Finding], seeds: range) -> str:
    """The section of the page with the table."""
    return "\n".join(_lines(found, seeds)) + "\n"


def _lines(found: Mapping[str, Finding], seeds: range) -> Iterator[str]:
    counts = [finding.programs for finding in found.values() if finding.programs]
    yield "## Mutants"
    yield ""
    yield (
        f"Programs {seeds.start}:{seeds.stop}. {len(found)} mutants searched for, {len(counts)} found, after "
        f"{statistics.median(counts):.0f} programs in the median and {max(counts)} at most. This section is written by"
    )
    yield ""
    command = f"python -m proofs.shard_map_fuzz.search --seeds {seeds.start}:{seeds.stop}"
    yield f"    {command} --markdown proofs/reports/shard_map_fuzz.md"
    for family, mutants in FAMILIES.items():
        rows = [
            (
                mutant.name,
                mutant.breaks,
                str(found[mutant.name].programs or f"none of {found[mutant.name].concerned}"),
                _how(found[mutant.name]),
            )
            for mutant in mutants
            if mutant.name in found
        ]
        if rows:
            yield ""
            yield f"### {family}"
            yield ""
            yield from table(("mutant", "what is broken", "programs", "how"), rows)


def _how(finding: Finding) -> str:
    return finding.outcome.status.value if finding.outcome else ""


if __name__ == "__main__":
    raise SystemExit(main())
