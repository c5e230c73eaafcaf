"""What torch's operators that take functions, as `torch.cond`, are in a trace: functions that layers above have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MEANINGS: dict[str, Callable[..., Any]] = {}


def meaning_of(operator: Any) -> Callable[..., Any] | None:
    """The function that is called in place of an operator that takes functions; None if there is none."""
    return _MEANINGS.get(operator.name())


def means(name: str) -> Callable[[_Function], _Function]:
    """A decorator for the function that is called, with its arguments, in place of the operator of this name."""

    def add(function: _Function) -> _Function:
        _MEANINGS[name] = function
        return function

    return add
