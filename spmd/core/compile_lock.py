"""The lock under which one thread at a time imports, traces and plans, and what is computed under it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

COMPILING = threading.RLock()
"""Held by the thread that imports, traces or plans, never while it waits for other ranks."""


class compiled_property(Generic[T]):  # a decorator, like functools.cached_property
    """A property that one thread computes, under the lock, at its first use.

    `functools.cached_property` has no lock from Python 3.12 on; before, it has one of its own, and two threads that
    take both in another order would wait for each other.

    Args:
        function: computes it.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> compiled_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> T | compiled_property[T]:
        """The value; later uses find it in the instance's `__dict__` and do not come here."""
        if instance is None:
            return self
        values = vars(instance)
        with COMPILING:
            if self._name not in values:
                values[self._name] = self._function(instance)
        return values[self._name]  # type: ignore[no-any-return]
