"""A fast sample of many parametrized cases; the others run in `make test-slow`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def product(first: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """The parameters of all combinations, of which a sample is fast: each value, and each combination of the others.

    >>> [case.values for case in product("abc", [1, 2]) if not case.marks]
    [('a', 1), ('b', 2), ('c', 1)]
    """
    leading, rest = list(first), list(itertools.product(*others))
    cases = []
    for (n, value), (m, more) in itertools.product(enumerate(leading), enumerate(rest)):
        fast = m == n % len(rest) if len(leading) >= len(rest) else n == m % len(leading)
        label = "-".join(map(_label, (value, *more)))
        cases.append(pytest.param(value, *more, id=label, marks=() if fast else pytest.mark.slow))
    return cases


def sample(values: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """The values as parameters, of which some are fast."""
    kept = list(fast)
    return [pytest.param(value, id=_label(value), marks=() if value in kept else pytest.mark.slow) for value in values]


def _label(value: Any) -> str:
    return str(getattr(value, "__name__", value))
