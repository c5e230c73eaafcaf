"""What a proof of a rule found."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from spmd.placement import Placement


@attrs.frozen
class Finding:
    """One wrong or missing row: the call, the number of shards, the placements, and what is wrong with them."""

    call: str
    ranks: int
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    reason: str = ""

    def __str__(self) -> str:
        placed = f"{_text(self.operands)} -> {_text(self.results)}"
        return f"{self.call} over {self.ranks}: {placed}{': ' if self.reason else ''}{self.reason}"


@attrs.frozen
class Report:
    """What `check_rule` found.

    Args:
        op: the operator.
        passed: how many executions of strategies were right.
        wrong: strategies that gave other results than the unsharded operator.
        missing: placements that no strategy covers although the plain operator is right on them.
    """

    op: torch._ops.OpOverload
    passed: int
    wrong: tuple[Finding, ...]
    missing: tuple[Finding, ...]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.passed} right, {len(self.wrong)} wrong, {len(self.missing)} missing"]
        lines += [f"  wrong    {finding}" for finding in self.wrong]
        return "\n".join([*lines, *(f"  missing  {finding}" for finding in self.missing)])


def _text(placements: Sequence[Placement]) -> str:
    return ", ".join(map(repr, placements))
