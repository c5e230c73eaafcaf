"""The results of a run of many programs, as tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from proofs.fuzz.outcome import BAD, Outcome, Status
from proofs.fuzz.pool import OPERATORS


def summarize(outcomes: Sequence[Outcome]) -> Mapping[str, Any]:
    """The figures of a run."""
    values = sum(outcome.values for outcome in outcomes)
    strided = sum(outcome.strided for outcome in outcomes)
    return {
        "programs": len(outcomes),
        **{status.value: sum(outcome.status is status for outcome in outcomes) for status in Status},
        "values not contiguous": f"{100 * strided / values:.0f}%" if values else "none",
        "with uneven arguments": sum(outcome.uneven for outcome in outcomes),
        "with empty shards": sum(outcome.empty for outcome in outcomes),
        "with partial arguments or results": sum(outcome.partial for outcome in outcomes),
        "collectives that ran": sum(outcome.collectives for outcome in outcomes),
        "operators of the pool": len(OPERATORS),
        "programs with the rarest operator": min(operator_counts(outcomes).values()),
        "ms a program": round(1000 * sum(outcome.seconds for outcome in outcomes) / max(1, len(outcomes))),
        "ms of that to generate it": round(
            1000 * sum(outcome.generating for outcome in outcomes) / max(1, len(outcomes))
        ),
    }


def operator_counts(outcomes: Iterable[Outcome]) -> Counter[str]:
    """In how many programs each operator of the pool is."""
    counts = Counter(dict.fromkeys(OPERATORS, 0))
    for outcome in outcomes:
        counts.update(outcome.operators)
    return counts


def show(outcomes: Sequence[Outcome], console: Console, examples: int = 12) -> None:
    """Print the tables."""
    _print(console, "", ("", "count"), summarize(outcomes).items())
    statuses = list(Status)
    by_transform: dict[str, Counter[Status]] = defaultdict(Counter)
    for outcome in outcomes:
        by_transform[outcome.transform][outcome.status] += 1
    rows = [(name, sum(found.values()), *(found[s] for s in statuses)) for name, found in sorted(by_transform.items())]
    _print(console, "transforms", ("transform", "programs", *(s.value for s in statuses)), rows)
    rare = sorted((count, name) for name, count in operator_counts(outcomes).items())[:10]
    _print(console, "rarest operators", ("operator", "programs"), [(name, count) for count, name in rare])
    for title, chosen in (("refused", {Status.REFUSED}), ("failures", BAD)):
        kinds: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            if outcome.status in chosen:
                kinds[outcome.status.value, outcome.kind].append(outcome)
        found = sorted(kinds.items(), key=lambda item: -len(item[1]))
        _print(
            console,
            title,
            ("status", "kind", "programs", "seeds"),
            [(s, kind, len(o), ", ".join(str(x.seed) for x in o[:examples])) for (s, kind), o in found],
        )


def _print(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*(str(cell).replace("[", "\\[") for cell in row))
    if table.row_count:
        console.print(table)
