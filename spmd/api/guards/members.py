"""Members of classes and objects, looked up without running the user's code."""

from __future__ import annotations

from types import FunctionType, MemberDescriptorType
from typing import Any

from spmd.api.guards.kinds import (
    LOOKUPS,
    MAPPINGS,
    ROWS,
)


def has_items(value: Any) -> bool:
    """Test for a container without a method for items in Python."""
    if isinstance(value, LOOKUPS):
        return type(value) in LOOKUPS
    return isinstance(value, (*ROWS, *MAPPINGS)) and not has_special(value, "__getitem__")


def has_special(value: Any, name: str) -> bool:
    """Test for a special method in Python of an object's class."""
    return isinstance(member(type(value), name)[1], FunctionType)


def member(kind: type, name: str, after: Any = None) -> tuple[type | None, Any]:
    """The class that has a name, in the order in which they are looked at, and what it has."""
    order = kind.__mro__
    if after in order:
        order = order[order.index(after) + 1 :]
    for base in order:
        if name in vars(base):
            return base, vars(base)[name]
    return None, None


def attributes_of(value: Any) -> dict[str, Any]:
    """The `__dict__` of an object, empty if it has none."""
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def slots_of(value: Any) -> list[str]:
    """The names of the slots of an object."""
    found = {n for kind in type(value).__mro__ for n, x in vars(kind).items() if isinstance(x, MemberDescriptorType)}
    return sorted(name for name in found if not name.startswith("__"))
