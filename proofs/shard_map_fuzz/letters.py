"""Types of per-rank values in generated programs: which calls are right, and what types their results have.

Written from the table of `docs/shard_map_types.md`, and not with the code that it checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proofs.shard_map_fuzz.program import Letters

COTANGENT = {"I": "I", "V": "V", "U": "R", "R": "U"}
"""The type of a cotangent."""


def along(letters: Letters, axes: Sequence[str]) -> set[str]:
    """The types of a value along some axes."""
    return {letters[axis] for axis in axes}


def changed(letters: Letters, axes: Sequence[str], to: str) -> dict[str, str]:
    """The types of a value after a change along some axes."""
    return {**letters, **dict.fromkeys(axes, to)}


def joined(found: Iterable[Letters]) -> dict[str, str] | None:
    """The types of a function of values, which are cast to one type; None if one of them is unreduced."""
    rows = list(found)
    result = {}
    for axis in rows[0]:
        kinds = {row[axis] for row in rows}
        if "U" in kinds:
            return None
        result[axis] = "V" if "V" in kinds else "R" if "R" in kinds else "I"
    return result


def bilinear(a: Letters, b: Letters) -> dict[str, str] | None:
    """The types of a function linear in `a`, where `b` is a coefficient; None if types forbid it.

    An unreduced value times one that varies is no sum of summands of one value.
    """
    result = {}
    for axis, kind in a.items():
        pair = (kind, b[axis])
        if kind == "U":
            if b[axis] not in "IR":
                return None
            result[axis] = "U"
        elif b[axis] == "U":
            return None
        else:
            result[axis] = "V" if "V" in pair else "R" if "R" in pair else "I"
    return result


def additive(a: Letters, b: Letters) -> dict[str, str] | None:
    """The types of a sum of values; None if along one axis one of them only is unreduced."""
    result = {}
    for axis, kind in a.items():
        pair = {kind, b[axis]}
        if "U" in pair and len(pair) > 1:
            return None
        result[axis] = "U" if "U" in pair else "V" if "V" in pair else "R" if "R" in pair else "I"
    return result


def has_unreduced(letters: Letters) -> bool:
    """Whether a value is unreduced along any axis."""
    return "U" in letters.values()
