"""The result of one entry of the database under one setup."""

from __future__ import annotations

import re
from enum import Enum

import attrs


class Status(str, Enum):
    """The status of an entry, which is the worst of its combinations; the members are ordered from best to worst."""

    SKIPPED = "skipped"  # plain torch fails, or there is no tensor to compare
    PASS = "pass"
    UNTRACEABLE = "untraceable"  # make_fx fails too
    REFUSED = "refused"  # a TraceError: shapes or control flow that depend on values
    ERROR = "error"
    WRONG = "wrong"
    HANG = "hang"
    CRASH = "crash"


BAD = frozenset({Status.ERROR, Status.WRONG, Status.HANG, Status.CRASH})
"""The statuses that make a sweep fail."""


def _by_status(failures: dict[str, str]) -> dict[Status, str]:
    return {Status(status): failure for status, failure in failures.items()}


@attrs.define
class Outcome:
    """The result of one entry.

    Args:
        name: the entry's full name.
        status: the worst of all combinations; an entry of which nothing runs is skipped.
        calls: the number of calls that plain torch runs.
        refused: the number of these that raise a TraceError, or that `make_fx` cannot trace either.
        traced: the number of calls that `make_fx` traces.
        unmatched: the number of those that do not pass here.
        combinations: the number of combinations of placements that were run.
        passed, wrong, errors: the number of combinations with each result.
        local: right combinations with a sharded operand, a sharded or partial result, and no collective.
        sharded: those of them that have a sharded result.
        uneven: right combinations in which shards of an operand differ in shape.
        empty: right combinations in which a rank has an empty shard of an operand.
        lengths: the lengths of the operands' dims in the calls.
        fallbacks: operators without a rule.
        failures: the first message of each status.
    """

    name: str
    status: Status = attrs.field(default=Status.SKIPPED, converter=Status)
    calls: int = 0
    refused: int = 0
    traced: int = 0
    unmatched: int = 0
    combinations: int = 0
    passed: int = 0
    wrong: int = 0
    errors: int = 0
    local: int = 0
    sharded: int = 0
    uneven: int = 0
    empty: int = 0
    lengths: list[int] = attrs.field(factory=list)
    fallbacks: list[str] = attrs.field(factory=list)
    failures: dict[Status, str] = attrs.field(factory=dict, converter=_by_status)

    def note(self, status: Status, failure: str = "") -> None:
        """Record the status of one combination, or of a call."""
        self.status = max(self.status, status, key=list(Status).index)
        if failure:
            self.failures.setdefault(status, f"{failure:.400}")

    @property
    def reason(self) -> str:
        """Why the status is what it is."""
        return self.failures.get(self.status, "")


def said_by(error: Exception) -> str:
    """The first line of an error, without file positions in torch and libraries."""
    lines = str(error).strip().splitlines() or [""]
    said = re.sub(r" at \S+ \(`[^`]*`\)", "", lines[0])  # a position in torch or a library, since there is no user code
    return f"{type(error).__name__}: {said:.300}"


def summarize(outcomes: list[Outcome]) -> dict[str, int]:
    """Counts of entries by status, and of combinations."""

    def entries(*statuses: Status) -> int:
        return sum(outcome.status in statuses for outcome in outcomes)

    def total(field: str) -> int:
        return sum(getattr(outcome, field) for outcome in outcomes)

    def having(field: str) -> int:
        return sum(getattr(outcome, field) > 0 for outcome in outcomes)

    return {
        "entries": len(outcomes),
        **{f"entries: {status.value}": entries(status) for status in Status},
        "combinations": total("combinations"),
        "combinations right": total("passed"),
        "combinations wrong": total("wrong"),
        "combinations in error": total("errors"),
        "combinations refused": total("combinations") - total("passed") - total("wrong") - total("errors"),
        "combinations right, with uneven shards": total("uneven"),
        "combinations right, with empty shards": total("empty"),
        "entries right with uneven shards": having("uneven"),
        "entries right with empty shards": having("empty"),
        "entries right without any collective": having("local"),
        "entries right without any collective, result sharded": having("sharded"),
        "entries with an operator without a rule": sum(bool(outcome.fallbacks) for outcome in outcomes),
        "calls refused": total("refused"),
    }
