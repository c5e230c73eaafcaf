"""Possible values of variables and stack items: accesses, constants, functions, rows.

A `Values` is what it may be at one place: several where branches join; with `UNKNOWN` among them, anything else, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any, TypeAlias

import attrs

from spmd.api.guards.access import Access
from spmd.api.guards.kinds import is_plain, key_of_value
from spmd.api.guards.limits import THINGS


@attrs.frozen
class Constant:
    """A plain value that stands in the code, or follows from what is read."""

    key: Any
    value: Any = attrs.field(eq=False)


@attrs.frozen(eq=False)
class Fixed:
    """An object that does not change: a function of a library, a class that an instruction makes known."""

    value: Any


@attrs.frozen(eq=False)
class Made:
    """A function that the code makes: its code, its defaults, the cells that it closes over, its globals."""

    code: CodeType
    defaults: Values
    keyword_defaults: Values
    cells: Mapping[str, Any]
    globals: Access


@attrs.frozen
class Bound:
    """A function with its first argument."""

    function: Any
    owner: Any


@attrs.frozen
class BuiltinMethod:
    """A method that is written in C, by name."""

    name: str
    owner: Any


@attrs.define(eq=False)
class Parts:
    """A row or a mapping that the code makes, which the code may change.

    Args:
        items: what each item may be.
        names: the keys of a mapping, if they are known.
        exact: whether the items are in their places, so that their number is known.
    """

    items: tuple[Values, ...]
    names: tuple[Any, ...] | None = None
    exact: bool = True

    def extend(self, added: Iterable[Values]) -> bool:
        """Let it have other items, somewhere; whether that is new."""
        items = tuple(dict.fromkeys((*self.items, *added)))
        grows, self.items, self.names = items != self.items or self.exact, items, None
        self.exact = False
        return grows


@attrs.frozen
class Super:
    """The classes that follow a class in an object's order of classes."""

    kind: Any
    owner: Any


class Unknown:
    """Anything."""

    def __repr__(self) -> str:
        return "UNKNOWN"


Thing: TypeAlias = Any  # Access, or any of the above
Values: TypeAlias = tuple[Thing, ...]

SOMETHING = Unknown()
UNKNOWN: Values = (SOMETHING,)
NULL: Values = (Fixed("null"),)


def constant(value: Any) -> Values:
    """A plain value, or a tuple of such."""
    if is_plain(value):
        return (Constant(key_of_value(value), value),)
    if isinstance(value, (tuple, frozenset)):
        return (Parts(tuple(map(constant, value))),)
    return (Fixed(value),)


def union(*each: Iterable[Thing]) -> Values:
    """One of several possible values."""
    found = tuple(dict.fromkeys(thing for values in each for thing in values))
    return found if len(found) <= THINGS else (*found[:THINGS], SOMETHING)


def plain_value(values: Values) -> tuple[bool, Any]:
    """The one plain value that it is, if it is one."""
    if len(values) == 1:
        (thing,) = values
        if isinstance(thing, Constant):
            return True, thing.value
        if isinstance(thing, Access) and is_plain(thing.value):
            return True, thing.value
    return False, None
