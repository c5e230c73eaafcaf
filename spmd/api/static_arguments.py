"""Static arguments as part of a cache key."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import attrs

_EXACT = (int, bool, str, bytes, type(None))


def static_key(value: Any) -> Any:
    """A cache key of a static argument: equal only for values of the same types, also inside containers.

    Unlike `==`, it distinguishes 1, 1.0 and True, and 0.0 and -0.0, and a NaN equals itself.

    >>> static_key((1, 0.0)) == static_key((1.0, 0.0)), static_key(-0.0) == static_key(0.0)
    (False, False)
    >>> static_key((float("nan"),)) == static_key((float("nan"),))
    True
    """
    kind = type(value)
    if kind in _EXACT:
        return kind, value
    if isinstance(value, numbers.Number):
        return kind, repr(value)
    if isinstance(value, tuple):
        return kind, tuple(map(static_key, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(static_key, value))
    return kind, _fields(value)


def _fields(value: Any) -> Any:
    """The keys of the fields by which a dataclass or attrs instance compares; any other value itself."""
    kind: Any = type(value)
    if kind.__eq__ is object.__eq__ or kind.__hash__ is None:
        return value
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind) if field.compare]
    elif attrs.has(kind):
        names = [field.name for field in attrs.fields(kind) if field.eq]
    else:
        return value
    key = tuple(static_key(getattr(value, name)) for name in names)
    try:
        hash(key)
    except TypeError:  # a field that is not hashable, so the class has its own `__hash__`
        return value
    return key
