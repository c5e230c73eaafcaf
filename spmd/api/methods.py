"""Jitted functions as methods: each instance has one of its own, which lives as long as the instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from spmd.errors import TraceError

Method = TypeVar("Method")

_NAME = "_spmd_methods"
"""The attribute of an instance that holds its methods."""


class _Methods(dict[Any, Any]):
    """The methods of one instance, by what they were made from; copies and pickles of the instance have none."""

    def __init__(self, instance: object) -> None:
        super().__init__()
        self.instance = instance

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()


def _none() -> None:
    return None


def bound_to(instance: Any, function: Any, bind: Callable[[Any], Method]) -> Method:
    """The method that `bind` makes of an instance, made at the first use.

    Raises:
        TraceError: an instance without a `__dict__`, which could not keep what is compiled for it.
    """
    try:
        attributes = instance.__dict__
    except AttributeError:
        raise TraceError(
            f"A method of {type(instance).__name__} is jitted, whose instances have no __dict__ to keep the compiled "
            "program. Leave out __slots__, or jit a function and pass it what it needs."
        ) from None
    methods = attributes.get(_NAME)
    if methods is None or methods.instance is not instance:  # that of the instance of which this one is a copy
        methods = _Methods(instance)
        if isinstance(instance, type):  # of a class method
            type.__setattr__(instance, _NAME, methods)
        else:
            attributes[_NAME] = methods
    found = methods.get(function)
    if found is None:
        found = methods[function] = bind(instance)
    return found  # type: ignore[no-any-return]
