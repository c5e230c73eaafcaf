"""Static arguments as part of a cache key."""

from __future__ import annotations

import dataclasses
import numbers
import re
from typing import Any

import attrs

from spmd.core.value_types import EXACT

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def static_key(value: Any) -> Any:
    """A cache key of a static argument: equal only for values of the same types, also inside containers.

    Unlike `==`, it distinguishes 1, 1.0 and True, and 0.0 and -0.0, and a NaN equals itself.

    >>> static_key((1, 0.0)) == static_key((1.0, 0.0)), static_key(-0.0) == static_key(0.0)
    (False, False)
    >>> static_key((float("nan"),)) == static_key((float("nan"),))
    True
    """
    kind = type(value)
    if kind in EXACT:
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


def static_text(key: Any) -> str:
    """A cache key of `static_key` as text that is the same in every process: no addresses, no order of hashes.

    >>> static_text(static_key((1, max, frozenset({"b", "a"}))))
    "(1, builtins.max, frozenset('a', 'b'))"
    """
    kind, value = key
    if isinstance(value, tuple) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        name = "" if kind is tuple else kind.__qualname__
        return f"{name}({', '.join(map(static_text, value))})"
    if isinstance(value, frozenset):
        return f"{kind.__qualname__}({', '.join(sorted(map(static_text, value)))})"
    return value if issubclass(kind, numbers.Number) and isinstance(value, str) else stable_text(value)


def stable_text(value: Any) -> str:
    """An object as text without its address; a function or a class by its name."""
    if hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))
