"""How many programs it takes to find a mutant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from proofs.fuzz.batches import check_seeds
from proofs.fuzz.check import check_seed, known_program
from proofs.fuzz.mutants.mutant import Mutant
from proofs.fuzz.outcome import Outcome, Status


@attrs.frozen
class Finding:
    """The result of the search for one mutant.

    Args:
        mutant: the name of the mutant.
        programs: how many programs, from the first seed on, the fuzzer takes to find it; 0 if it does not.
        concerned: how many of these programs can show the defect.
        outcome: the outcome of the program that found it.
    """

    mutant: str
    programs: int
    concerned: int
    outcome: Outcome | None = None

    def data(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return {**attrs.asdict(self), "outcome": self.outcome.data() if self.outcome else None}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Finding:
        """The inverse of `data`."""
        return cls(**{**data, "outcome": Outcome.of(data["outcome"]) if data["outcome"] else None})


def find(
    mutant: Mutant,
    unbroken: Sequence[Outcome],
    *,
    jobs: int = 1,
    seconds: float = 60.0,
    known: Callable[[int], Any] = known_program,
    check_one: Callable[..., Outcome] = check_seed,
) -> Finding:
    """Run programs in the broken package until one fails that was right in the unbroken package.

    Args:
        mutant: the defect.
        unbroken: the outcomes of the programs in the unbroken package, by ascending seed.
        jobs, seconds, known, check_one: as in `check_seeds`.
    """
    seeds = [outcome.seed for outcome in unbroken if mutant.concerns(outcome)]
    first = unbroken[0].seed if unbroken else 0
    outcomes = check_seeds(
        seeds, jobs=jobs, seconds=seconds, within=mutant.applied, repeat=False, known=known, check_one=check_one
    )
    try:
        for count, outcome in enumerate(outcomes, 1):
            if outcome.status not in (Status.RIGHT, Status.SKIPPED):
                return Finding(mutant.name, outcome.seed - first + 1, count, outcome)
    finally:
        outcomes.close()
    return Finding(mutant.name, 0, len(seeds))
