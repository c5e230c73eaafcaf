"""A training step by `spmd` and by torch's parallel systems on links of a chosen rate: how much communication shows.

All systems take turns in the same processes, first on links of the rate, then on links without one. The communication
of a step is exposed where the step takes longer on the links of the rate, by the part of it that this adds. `spmd` runs
once more with collectives that are waited for where they are launched, so that nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

import link
from peer_steps import Case, Comparison, Timing, first_steps, from_ranks, prepare, start, timed, timing
from proofs.page import table as markdown_table
from spmd.collectives.transport.exchange import wait
from spmd.core.pytree import tree_leaves
from spmd.runtime.communication import EXCHANGES

ALLOWED = 0.15
"""The part of a step that may be exposed communication."""

WARM = 250_000
"""Numbers in the all_reduce that runs after the rate of the links has changed."""

COLUMNS = (
    "what",
    "width",
    "batch",
    "peer",
    "spmd wall, ms",
    "peer wall, ms",
    "ratio",
    "spmd synchronous, ms",
    "spmd free link, ms",
    "peer free link, ms",
    "spmd exposed",
    "planned",
    "peer exposed",
    "spmd MB",
    "on the link, ms",
    "",
)
"""Of the table; the last but one has the time that the bytes that a rank of `spmd` sends take at the rate."""

SYNCHRONOUS = "spmd, synchronous"


@attrs.frozen
class LinkComparison:
    """A case on links of a rate, and on links without one.

    Args:
        rate: bits a second.
        limited: on links of the rate.
        free: on links without.
        synchronous: `spmd` on links of the rate, waiting for each collective where it is launched.
        planned: the part of a step of `spmd` that its schedule exposes, as predicted.
    """

    rate: float
    limited: Comparison
    free: Comparison
    synchronous: Timing
    planned: float

    def disagreement(self) -> str:
        """As `Comparison.disagreement`."""
        return self.limited.disagreement()


def rows(found: Sequence[LinkComparison]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, a row for each peer; the last says what `spmd` loses, or why a peer fails."""
    for comparison in found:
        limited = comparison.limited
        ours, free = limited.spmd.wall, comparison.free.spmd.wall
        for name, peer in limited.peers.items():
            theirs = comparison.free.peers[name].wall
            yield (
                limited.what,
                str(limited.width),
                str(limited.batch),
                name,
                milliseconds(ours),
                *(("fails", "") if peer.error else (milliseconds(peer.wall), f"{ours / peer.wall:.2f}")),
                milliseconds(comparison.synchronous.wall),
                milliseconds(free),
                "" if peer.error else milliseconds(theirs),
                f"{exposed(ours, free):.0%}",
                f"{comparison.planned:.0%}",
                "" if peer.error else f"{exposed(peer.wall, theirs):.0%}",
                f"{limited.sent / 1e6:.2f}",
                milliseconds(8 * limited.sent / comparison.rate),
                peer.error or verdict(ours, free, peer.wall, comparison.planned),
            )


def milliseconds(seconds: float) -> str:
    """A cell."""
    return f"{1e3 * seconds:.1f}"


def exposed(limited: float, free: float) -> float:
    """The part of a step's seconds on links of a rate that it does not take on links without."""
    return (limited - free) / limited


def verdict(ours: float, free: float, peer: float, planned: float) -> str:
    """What `spmd` loses, and whether its schedule says so."""
    found = ["loses wall"] if ours > peer else []
    if exposed(ours, free) > ALLOWED:
        found.append(f"exposes more than {ALLOWED:.0%}{', as planned' if planned > ALLOWED else ''}")
    return ", ".join(found)


def measure_on_links(case: Case, rounds: int, rate: str) -> LinkComparison:
    """Run a case on the ranks of a job of `link.launch`; a collective call."""
    start()
    change(rate)  # a machine that is measured is that of these links
    overlapping = Overlap()
    prepared = prepare(case)
    losses, failures = first_steps(prepared.steps)
    steps = {name: step for name, step in prepared.steps.items() if name in losses} | {
        SYNCHRONOUS: overlapping.without(prepared.ours)
    }
    times: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for limited in (True, False):
            change(rate if limited else None)
            for name, step in steps.items():
                times.setdefault((name, limited), []).append(timed(step))
    found = {key: timing(from_ranks(rows), losses.get(key[0], losses["spmd"])) for key, rows in times.items()}
    comparisons = [
        prepared.comparison({name: found[name, limited] for name in losses} | failures) for limited in (True, False)
    ]
    planned = prepared.ours.timing.exposed / prepared.ours.timing.step
    return LinkComparison(link.bits_per_second(rate), *comparisons, found[SYNCHRONOUS, True], planned)


def change(rate: str | None) -> None:
    """Set the rate of the links, and send something: connections adapt to it."""
    dist.barrier()
    link.throttle(rate)
    dist.all_reduce(torch.ones(WARM))


class Overlap:
    """Decides whether the collectives of programs that are compiled from now on overlap with what follows them."""

    def __init__(self) -> None:
        self._waits = False
        for kind in EXCHANGES:
            kind.start = self._waiting(kind.start)

    def without(self, step: Callable[[], float]) -> Callable[[], float]:
        """The step with collectives that are waited for where they are launched."""

        def synchronous() -> float:
            self._waits = True
            try:
                return step()
            finally:
                self._waits = False

        return synchronous

    def _waiting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def started(exchange: Any, *operands: torch.Tensor) -> Any:
            pending = start(exchange, *operands)
            if self._waits:
                for leaf in tree_leaves(pending):
                    if isinstance(leaf, torch.Tensor):
                        wait(leaf)
            return pending

        return started


def page(found: Sequence[LinkComparison]) -> Iterator[str]:
    """The lines of the table; what `spmd` loses is bold."""
    lost = {6: "loses", 10: "exposes"}
    shown = [
        [f"**{cell}**" if lost.get(number, "none") in row[-1] else cell for number, cell in enumerate(row)]
        for row in rows(found)
    ]
    yield from markdown_table(COLUMNS, shown)
