"""The report of a proof of a rule."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from spmd.core.placement import Partial, Placement, Shard


@attrs.frozen
class Finding:
    """One wrong or missing row.

    Args:
        call: the call, as text.
        ranks: the number of shards.
        operands, results: the placements.
        reason: what is wrong; empty for a missing row.
    """

    call: str
    ranks: int
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    reason: str = ""

    @property
    def row(self) -> str:
        """The placements in short: `R, S0, sum -> max`."""
        return f"{_short(self.operands)} -> {_short(self.results)}"

    def __str__(self) -> str:
        placed = f"{_text(self.operands)} -> {_text(self.results)}"
        return f"{self.call} over {self.ranks}: {placed}{': ' if self.reason else ''}{self.reason}"


@attrs.frozen
class Report:
    """What `check_rule` found.

    Args:
        op: the operator's name.
        calls: how many calls it was run on.
        strategies: how many strategies there are, over all calls.
        passed: how many executions of strategies were right.
        wrong: executions of strategies whose results differ from the unsharded operator's.
        valid: how many valid rows the search found; 0 if there was no search.
        missing: the valid rows that no strategy implies.
    """

    op: str
    calls: int = 0
    strategies: int = 0
    passed: int = 0
    wrong: tuple[Finding, ...] = ()
    valid: int = 0
    missing: tuple[Finding, ...] = ()

    def join(self, other: Report) -> Report:
        """The sum of two reports on the same operator."""
        return Report(
            self.op,
            self.calls + other.calls,
            self.strategies + other.strategies,
            self.passed + other.passed,
            self.wrong + other.wrong,
            self.valid + other.valid,
            self.missing + other.missing,
        )

    def __str__(self) -> str:
        counts = f"{self.passed} right, {len(self.wrong)} wrong, {len(self.missing)} of {self.valid} missing"
        lines = [f"{self.op}: {counts}"]
        lines += [f"  wrong    {finding}" for finding in self.wrong]
        return "\n".join([*lines, *(f"  missing  {finding}" for finding in self.missing)])


def _text(placements: Sequence[Placement]) -> str:
    return ", ".join(map(repr, placements))


def _short(placements: Sequence[Placement]) -> str:
    return ", ".join(map(_letter, placements))


def _letter(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return placement.op if isinstance(placement, Partial) else "R"
