"""The table of a scale of jobs, and how its figures grow."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from proofs.page import table
from proofs.scale_of_jobs.measure import PHASES, Life, killed

Lives = Mapping[int, Mapping[int, Life]]
"""The lives of ranks, by the number of ranks of their job."""


def unnamed(lives: Lives) -> list[str]:
    """What is wrong: ranks of a job that did not end, or do not name the one that was killed."""
    found = []
    for ranks, job in lives.items():
        absent = sorted(set(range(ranks)) - {killed(ranks)} - job.keys())
        found += [f"{ranks} ranks: no answer of {absent}"] if absent else []
        found += [
            f"{ranks} ranks: rank {rank} says {life.error!r}"
            for rank, life in job.items()
            if not re.search(rf"rank {killed(ranks)} does not answer", life.error)
        ]
    return found


def growth(figures: Mapping[int, float]) -> float:
    """The exponent of the power law that fits figures best: 1 for linear growth, 0 for none."""
    points = [(math.log(ranks), math.log(max(value, 1.0))) for ranks, value in figures.items()]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def slope(figures: Mapping[int, float]) -> float:
    """The slope of the line that fits figures best: how much each rank adds."""
    x, y = sum(figures) / len(figures), sum(figures.values()) / len(figures)
    return sum((a - x) * (b - y) for a, b in figures.items()) / sum((a - x) ** 2 for a in figures)


def markdown(lives: Lives) -> str:
    """The tables of a page."""
    return "\n".join([*_phases(lives), "", *_growth(lives), ""])


def _phases(lives: Lives) -> Iterator[str]:
    head = (
        "phase", "ranks", "operations, all ranks", "of rank 0", "of another, most",
        "looks, most",
        "descriptors of rank 0", "of another, most", "seconds",
    )  # fmt: skip
    rows = []
    for phase in PHASES:
        for ranks, job in lives.items():
            found = {rank: life.phases[phase] for rank, life in job.items()}
            others = [each for rank, each in found.items() if rank > 0]
            rows.append(
                [
                    phase,
                    f"{ranks}",
                    f"{sum(each.total for each in found.values()):,}",
                    f"{found[0].total}",
                    f"{max(each.total for each in others)}",
                    f"{max(each.looks for each in found.values())}",
                    f"{found[0].descriptors}",
                    f"{max(each.descriptors for each in others)}",
                    f"{max(each.seconds for each in found.values()):.1f}",
                ]
            )
    yield from table(head, rows)


def _growth(lives: Lives) -> Iterator[str]:
    def of_all(phase: str) -> dict[int, float]:
        return {ranks: sum(life.phases[phase].total for life in job.values()) for ranks, job in lives.items()}

    def of_each(phase: str) -> dict[int, float]:
        return {ranks: of_all(phase)[ranks] / len(job) for ranks, job in lives.items()}

    def descriptors(phase: str, first: bool) -> dict[int, float]:
        return {
            ranks: max(life.phases[phase].descriptors for rank, life in job.items() if (rank == 0) is first)
            for ranks, job in lives.items()
        }

    head = (
        "phase",
        "operations of all: power of the ranks",
        "of a rank, mean: power of the ranks",
        "descriptors that a rank adds to rank 0",
        "that it adds to others",
    )
    yield from table(
        head,
        [
            [
                phase,
                f"{growth(of_all(phase)):.2f}",
                f"{growth(of_each(phase)):.2f}",
                f"{slope(descriptors(phase, True)):.2f}",
                f"{slope(descriptors(phase, False)):.2f}",
            ]
            for phase in PHASES
        ],
    )


def summary(lives: Lives) -> Sequence[str]:
    """The lines for a terminal."""
    return [markdown(lives), *unnamed(lives)]
