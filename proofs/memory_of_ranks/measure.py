"""Measures cases on the ranks of a job; all ranks call these functions together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch.distributed as dist

from proofs.memory_of_ranks.live import peaks
from proofs.memory_of_ranks.program import MACHINE, Case
from spmd.errors import PlanError

LEAST = 0.9
"""The part of `plan.memory` that must be live at some point."""


@attrs.frozen
class Row:
    """What one plan says, and what the ranks hold.

    Args:
        program, even, ranks: the case.
        plan: the peak of `plan.memory`, in bytes; 0 if there is no plan.
        live: the most bytes in live storages, of each rank.
        allocator: the most bytes that the allocator gave out, of each rank.
        where: the operator after which the first of the ranks that hold the most does.
        collectives: how many of each kind the plan has.
        limit: `memory_limit`, if there is one.
        share: the limit that was asked for over the peak without it.
        note: why there are no figures, or what became of the limit.
        held: of the plan and of the rank that holds the most, what they hold at their peaks, as text.
    """

    program: str
    even: bool
    ranks: int
    plan: int = 0
    live: tuple[int, ...] = ()
    allocator: tuple[int, ...] = ()
    where: str = ""
    collectives: Mapping[str, int] = attrs.field(factory=dict)
    limit: int | None = None
    share: float | None = None
    note: str = ""
    held: str = attrs.field(default="", repr=False)

    @property
    def ratio(self) -> float:
        """The most that any rank holds in live storages over what the plan says."""
        return max(self.live) / self.plan if self.plan else float("nan")

    @property
    def allocator_ratio(self) -> float:
        """The same of the allocator."""
        return max(self.allocator) / self.plan if self.plan else float("nan")

    @property
    def verdict(self) -> str:
        """What is wrong; empty if nothing is."""
        if not self.plan:
            return self.note
        if max(self.live) > self.plan:
            return f"holds {max(self.live) - self.plan:,} bytes more than the plan says, after {self.where}"
        if self.limit is not None:
            return "" if self.plan <= self.limit else "the plan exceeds its limit"
        return "" if self.ratio >= LEAST else f"holds less than {LEAST:.0%} of what the plan says"


def measure(name: str, case: Case, even: bool, **options: Any) -> Row:
    """Plan and run a case; `options` go to `spmd.jit`.

    Raises:
        PlanError: it has no plan that fits in the limit.
    """
    ranks = dist.get_world_size()
    step = case.jit(machine=MACHINE, **options)
    plan = step.plan(*case.arguments())
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, peaks(step, case.arguments))
    most = max(found, key=lambda rank: rank.live)
    return Row(
        name,
        even,
        ranks,
        plan.memory.peak,
        tuple(rank.live for rank in found),
        tuple(rank.allocator for rank in found),
        most.where,
        dict(Counter(comm.kind for comm in plan.comms)),
        held=f"plan: {plan.memory}\nlive: {most.live:,} bytes after {most.where}\n{most.held}",
    )


def under_limits(name: str, case: Case, even: bool, shares: tuple[float, ...]) -> Iterator[Row]:
    """The same under limits that are parts of the peak without one.

    A limit that is refused is replaced by the smallest peak that the error names, which must be accepted.
    """
    free = measure(name, case, even)
    yield free
    accepted: dict[int, Row] = {}
    for share in shares:
        limit, note = int(share * free.plan), "met"
        try:
            accepted[limit] = measure(name, case, even, memory_limit=limit)
        except PlanError as error:
            limit = smallest_peak(error)
            note = f"refused: at least {limit / free.plan:.0%}"
        try:
            row = accepted.get(limit) or measure(name, case, even, memory_limit=limit)
        except PlanError:
            yield Row(name, even, free.ranks, limit=limit, share=share, note=f"{note}, and this is refused, too")
            continue
        accepted[limit] = row
        yield attrs.evolve(row, limit=limit, share=share, note=note)


def smallest_peak(error: PlanError) -> int:
    """The smallest peak, in bytes, that the refusal of a limit names."""
    _, _, rest = str(error).partition("smallest peak found is ")
    return int(rest.partition(" bytes")[0].replace(",", ""))
