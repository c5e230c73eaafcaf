"""Names of values: valid in Python, and unique in a program."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from functools import lru_cache

_RESERVED = frozenset({*keyword.kwlist, *dir(builtins), "torch", "device", "inf", "nan"})
"""Names that mean something else in the text of a program."""


class Namer:
    """Generates names that are valid in Python and unique in a program: `mm`, `mm_1`, ..."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def fresh(self, hint: str) -> str:
        """A new unique name based on `hint`: the hint itself, if it is free."""
        base = _identifier(hint)
        return self._numbered(base, self._counts.get(base, 0))

    def parameter(self, hint: str) -> str:
        """As `fresh`, but never a name that Python or torch uses, such as `input`."""
        base = _identifier(hint)
        return self._numbered(base, max(self._counts.get(base, 0), base in _RESERVED))

    def numbered(self, hint: str) -> str:
        """A new unique name that ends with a number, from 1 on, so that it differs from the name of an operator."""
        base = _identifier(hint)
        return self._numbered(base, max(self._counts.get(base, 0), 1))

    def _numbered(self, base: str, count: int) -> str:
        name = f"{base}_{count}" if count else base
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count + 1
        self._taken.add(name)
        return name


@lru_cache(maxsize=4096)
def _identifier(hint: str) -> str:
    base = re.sub(r"\W+", "_", hint).strip("_") or "value"
    return f"_{base}" if base[0].isdigit() else base
