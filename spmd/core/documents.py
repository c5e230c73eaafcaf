"""JSON documents from untrusted sources: parsed strictly, and checked against a schema before they are used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

_LARGEST = 2**63
_LARGEST_FLOAT = 1e300  # small enough that sums of many such numbers are finite


@attrs.frozen
class ListOf:
    """A list whose items all have the schema `item`."""

    item: Kind


@attrs.frozen
class MapOf:
    """An object with any keys, whose values all have the schema `item`."""

    item: Kind


@attrs.frozen
class Fields:
    """An object with exactly the keys of `kinds`, each value with the schema given for its key."""

    kinds: Mapping[str, Kind]


@attrs.frozen
class Maybe:
    """A value with the schema `kind`, or null."""

    kind: Kind


Kind: TypeAlias = type | ListOf | MapOf | Fields | Maybe
"""The schema of a part of a document; `int` stands for 0 to 2^63 - 1, `float` for numbers from 0 to 1e300."""

_TEXTS: Mapping[type, str] = {
    int: "a whole number from 0",
    float: "a finite number from 0",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def parse(text: str) -> Any:
    """Parse a JSON document.

    Raises:
        ValueError: it is not JSON, is nested too deeply, has a key twice in one object, or contains NaN or Infinity.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def schema_violation(document: Any, kind: Kind) -> str | None:
    """The first violation of a schema in a document, as text: path, expected and actual value; None if it conforms.

    >>> schema_violation({"sizes": [3, -1]}, Fields({"sizes": ListOf(int)}))
    "['sizes'][1] must be a whole number from 0 (got -1)"
    """
    found = _misfit(document, kind)
    if found is None:
        return None
    place, text = found
    return f"{''.join(f'[{key!r}]' for key in place) or 'the document'} {text}"


_Misfit: TypeAlias = tuple[tuple[str | int, ...], str]


def _misfit(value: Any, kind: Kind) -> _Misfit | None:
    if isinstance(kind, type):
        return None if _fits(value, kind) else _must_be(kind, value)
    if isinstance(kind, Maybe):
        return None if value is None else _misfit(value, kind.kind)
    if isinstance(kind, ListOf):
        return _misfit_of_items(enumerate(value), kind.item) if type(value) is list else _must_be(list, value)
    if type(value) is not dict:
        return _must_be(dict, value)
    if isinstance(kind, MapOf):
        return _misfit_of_items(value.items(), kind.item)
    if value.keys() != kind.kinds.keys():
        missing = [f"must have {key!r}" for key in kind.kinds if key not in value]
        return (), (missing or [f"has {key!r:.80}, which is not known" for key in value if key not in kind.kinds])[0]
    return next((_within(key, found) for key in value if (found := _misfit(value[key], kind.kinds[key]))), None)


def _misfit_of_items(items: Iterable[tuple[str | int, Any]], kind: Kind) -> _Misfit | None:
    if isinstance(kind, type):
        return next((_within(key, _must_be(kind, item)) for key, item in items if not _fits(item, kind)), None)
    return next((_within(key, found) for key, item in items if (found := _misfit(item, kind))), None)


def _within(key: str | int, schema_violation: _Misfit) -> _Misfit:
    return (key, *schema_violation[0]), schema_violation[1]


def _fits(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < _LARGEST
    if kind is float:
        return type(value) in (int, float) and 0 <= value <= _LARGEST_FLOAT
    return type(value) is kind


def _must_be(kind: type, value: Any) -> _Misfit:
    text = repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
    return (), f"must be {_TEXTS[kind]} (got {text if len(text) <= 80 else text[:80] + '...'})"


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number of JSON")
