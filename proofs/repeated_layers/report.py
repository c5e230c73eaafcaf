"""The results of a run of many programs as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from proofs.page import table
from proofs.repeated_layers.compare import ERRORS, Compared, Figures, Verdict
from spmd.core.quantity import size_text, time_text

WORST = 10
"""How many programs are listed by name."""


def line(found: Compared) -> str:
    """One program: what was found, and the figures that differ."""
    text = found.verdict.value
    if found.verdict in (Verdict.BETTER, Verdict.WORSE):
        text += f" by {abs(found.ratio - 1):.2%}"
    differences = _differences(found.whole, found.folded) if found.whole and found.folded else []
    if found.bits is False:
        differences.append("other bits")
    return ": ".join(filter(None, [f"seed {found.seed}", text, ", ".join(differences), found.message, found.name]))


def differs(found: Compared) -> bool:
    """Test for a program whose line is to be read."""
    if found.verdict is not Verdict.EQUAL or found.bits is False:
        return True
    return bool(found.whole and found.folded and _differences(found.whole, found.folded))


def _differences(whole: Figures, folded: Figures) -> list[str]:
    rows: list[tuple[str, Callable[[Figures], float], Callable[[float], str]]] = [
        ("", lambda figures: figures.seconds, time_text),
        ("step ", lambda figures: figures.step, time_text),
        ("sent ", lambda figures: figures.bytes, size_text),
        ("collectives ", lambda figures: figures.collectives, lambda number: f"{number:.0f}"),
        ("peak ", lambda figures: figures.peak, size_text),
    ]
    found = []
    for name, of, text in rows:
        before, after = of(whole), of(folded)
        if abs(after - before) > 1e-3 * max(before, after):
            found.append(f"{name}{text(before)} -> {text(after)}")
    return found


def summary(found: Sequence[Compared]) -> Iterator[str]:
    """The counts of a run, the programs whose plans became worse by most, and the time of both searches."""
    counts = Counter(each.verdict for each in found)
    yield from table(("programs", str(len(found))), [(verdict.value, str(counts[verdict])) for verdict in Verdict])
    planned = [(each, each.whole, each.folded) for each in found if each.whole and each.folded]
    if not planned:
        return
    yield ""
    rows: list[tuple[str, Callable[[Figures], float], Callable[[float], str]]] = [
        ("processor seconds of planning", lambda figures: figures.search, lambda number: f"{number:.1f}"),
        ("predicted seconds", lambda figures: figures.seconds, time_text),
        ("bytes sent per rank", lambda figures: figures.bytes, size_text),
        ("collectives", lambda figures: figures.collectives, lambda number: f"{number:,.0f}"),
        ("peaks", lambda figures: figures.peak, size_text),
        ("plans that state that they are exact", lambda figures: figures.gap == 0, lambda number: f"{number:.0f}"),
    ]
    yield from table(
        ("in all", "every layer", "folded"),
        [
            (name, text(sum(of(w) for _, w, _ in planned)), text(sum(of(f) for *_, f in planned)))
            for name, of, text in rows
        ],
    )
    shares = [each.repeated / each.operations for each, *_ in planned]
    average = sum(shares) / len(shares)
    yield f"{sum(share > 0 for share in shares)} have layers between equal ones, on average {average:.0%} of operations"
    bits = Counter(each.bits for each, *_ in planned)
    yield f"plans with the same collectives: {bits[True]} compute the same bits, {bits[False]} do not"
    yield f"{sum(each.identical for each, *_ in planned)} of {len(planned)} plans are the same, operation by operation"
    by_ratio = sorted((each for each, *_ in planned if each.verdict is Verdict.WORSE), key=lambda each: -each.ratio)
    for title, some in (("worse", by_ratio), ("errors", [each for each in found if each.verdict in ERRORS])):
        if some:
            yield ""
            yield f"{title}:"
            yield from map(line, some[:WORST] if title == "worse" else some)
