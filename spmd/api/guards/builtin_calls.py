"""The reads of functions and methods that are written in C."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from spmd.api.guards.access import Access, Attribute, ContextValue, Line, Unset
from spmd.api.guards.checks import ByIdentity, OfMeta, OfSize, OfType
from spmd.api.guards.kinds import MAPPINGS, ROWS, SETS, is_plain
from spmd.api.guards.things import UNKNOWN, Fixed, Parts, Values, constant, plain_value, union

Reader: TypeAlias = Any
"""The reader, whose calls come here."""

HOST_CALLS = frozenset([("spmd.debug", "callback"), ("spmd.collectives.callbacks", "pure_callback")])
"""Functions that let a program call a function of the host, their first argument."""

WRITERS = frozenset(
    [
        "append",
        "extend",
        "add",
        "insert",
        "update",
        "appendleft",
        "extendleft",
        "discard",
        "remove",
        "clear",
        "sort",
        "reverse",
    ]
)
"""Methods of containers that write, and read nothing that a program could depend on."""

READING_WRITERS = frozenset(["pop", "popitem", "popleft", "setdefault"])
_READERS = ["get", "items", "keys", "values", "__getitem__", "__contains__", "__iter__", "__len__"]
METHODS = WRITERS | READING_WRITERS | frozenset(_READERS)


def method(reader: Reader, owner: Any, name: str, args: list[Values], named: dict[str, Values], line: Line) -> Values:
    """The result of a method of one of Python's own objects."""
    if isinstance(owner, Access) and isinstance(owner.value, ContextVar):
        return _of_context(reader, owner, name, args, line)
    if name in WRITERS | READING_WRITERS:
        known, key = plain_value(args[0]) if args else (False, None)
        reader.writes(owner, "item", key if known and name == "setdefault" else None, line)
        if isinstance(owner, Parts):
            owner.extend((*args, *(reader.iterated(values, line) for values in args)) if args else (UNKNOWN,))
    if name != "get":
        for values in (*args, *named.values()):
            reader.whole(values, line)
    if name in WRITERS:
        return constant(None)
    if name in ("get", "setdefault") and args:
        return reader.with_default((owner,), args[0], args[1] if len(args) > 1 else constant(None), line)
    if name in ("items", "values", "keys", "__iter__"):
        return _entries(reader, owner, name, line)
    if name == "__getitem__" and args:
        return reader.item((owner,), args[0], line)
    if name == "__contains__" and args:
        return reader.contains((owner,), args[0], False, line)
    if name == "__len__":
        return _len(reader, [(owner,)], line)
    reader.whole((owner,), line)
    known, value = plain_value((owner,))
    given = [plain_value(values) for values in args]
    if known and isinstance(value, str) and all(k for k, _ in given) and not named and name not in ("join", "encode"):
        try:
            result = getattr(value, name)(*(x for _, x in given))
        except Exception:
            return UNKNOWN
        return constant(result) if is_plain(result) else UNKNOWN
    return UNKNOWN


def _of_context(reader: Reader, owner: Access, name: str, args: list[Values], line: Line) -> Values:
    """The result of a method of a variable of the context."""
    if name != "get":
        reader.writes(owner, "value", None, line)
        return UNKNOWN
    step = ContextValue()
    held = owner.child(step, step.of(owner.value), line)
    if held.value is not Unset:
        return (held,)
    held.expect(ByIdentity)
    try:
        return args[0] if args else (reader.root(owner.value.get(), owner.label, line),)
    except LookupError:
        return UNKNOWN


def _entries(reader: Reader, owner: Any, name: str, line: Line) -> Values:
    keys = reader.iterated((owner,), line)
    if name in ("keys", "__iter__"):
        return reader.row((keys,))
    if isinstance(owner, Parts):
        pairs = [_pair(reader, k, v) for k, v in zip(owner.names or (), owner.items, strict=False)]
        return reader.row(pairs or (UNKNOWN,))
    if not isinstance(owner, Access) or not isinstance(owner.value, MAPPINGS):
        reader.whole((owner,), line)
        return UNKNOWN
    items = reader.items_of(owner, line)
    if name == "values":
        return reader.row((items,))
    return reader.row(
        [
            _pair(reader, getattr(item.step, "key", None), (item,)) if isinstance(item, Access) else UNKNOWN
            for item in items
        ]
    )


def _pair(reader: Reader, key: Any, values: Values) -> Values:
    return reader.row((constant(key) if is_plain(key) else UNKNOWN, values))


def _len(reader: Reader, args: list[Values], line: Line) -> Values:
    for thing in args[0] if args else ():
        value = getattr(thing, "value", None)
        if isinstance(thing, Access) and isinstance(value, (*ROWS, *SETS, *MAPPINGS)):
            thing.expect(OfSize)
            if len(args[0]) == 1:
                return constant(len(value))
        elif isinstance(thing, Access) and isinstance(value, torch.Tensor):
            thing.expect(OfMeta)
        elif isinstance(thing, Access) and not is_plain(value):
            reader.call(reader.attribute((thing,), "__len__", line), [], {}, line)
            reader.whole((thing,), line)
        else:
            reader.whole((thing,), line)
    return UNKNOWN


def _isinstance(reader: Reader, args: list[Values], line: Line) -> Values:
    for thing in args[0]:
        if isinstance(thing, Access):
            thing.expect(OfMeta if isinstance(thing.value, torch.Tensor) else OfType)
    kinds = [thing.value for thing in args[1] if isinstance(thing, (Access, Fixed))] if len(args) > 1 else []
    for thing in args[1] if len(args) > 1 else ():
        if isinstance(thing, Access):
            thing.expect(ByIdentity)
    if len(args[0]) == 1 and isinstance(args[0][0], Access) and len(kinds) == 1 and isinstance(kinds[0], type):
        return constant(isinstance(args[0][0].value, kinds[0]))
    return UNKNOWN


def _type(reader: Reader, args: list[Values], line: Line) -> Values:
    if len(args) == 1:
        return reader.attribute(args[0], "__class__", line)
    return UNKNOWN


def _getattr(reader: Reader, args: list[Values], line: Line) -> Values:
    if len(args) < 2:
        return UNKNOWN
    found = []
    for thing in args[1]:
        known, name = plain_value((thing,))
        if not known or not isinstance(name, str):
            reader.whole(args[0], line)
            for owner in args[0]:
                reader.writes(owner, "item", None, line)
            return UNKNOWN
        reader.whole((thing,), line)
        missing = any(isinstance(owner, Access) and not _has(owner.value, name) for owner in args[0])
        found.append(reader.attribute(args[0], name, line))
        if len(args) > 2 and missing:
            found.append(args[2])
            found = [args[2]] if len(args[0]) == 1 and len(args[1]) == 1 else found
    return union(*found)


def _hasattr(reader: Reader, args: list[Values], line: Line) -> Values:
    known, name = plain_value(args[1]) if len(args) > 1 else (False, None)
    if not known or not isinstance(name, str) or len(args[0]) != 1 or not isinstance(args[0][0], Access):
        for values in args:
            reader.whole(values, line)
        return UNKNOWN
    owner = args[0][0]
    if isinstance(owner.value, torch.Tensor):
        owner.expect(OfMeta)
        return UNKNOWN
    present = _has(owner.value, name)
    if owner.is_compared and not present:
        owner.absent.add(Attribute(name))
    elif owner.is_compared:
        reader.expect_present(owner, name, line)
    return constant(present)


def _has(value: Any, name: str) -> bool:
    """Test for an attribute without calling the user's code."""
    if name in getattr(value, "__dict__", ()):
        return True
    return any(name in vars(kind) for kind in type(value).__mro__) or (
        isinstance(value, type) and any(name in vars(kind) for kind in value.__mro__)
    )


def _setattr(reader: Reader, args: list[Values], line: Line) -> Values:
    known, name = plain_value(args[1]) if len(args) > 1 else (False, None)
    for owner in args[0]:
        reader.writes(owner, "attribute", name if known else None, line)
    for values in args[2:]:
        reader.whole(values, line)
    return constant(None)


def _next(reader: Reader, args: list[Values], line: Line) -> Values:
    for thing in args[0]:
        if isinstance(thing, Access):
            reader.iterators.append((thing.label, line))
    return reader.iterated(tuple(thing for thing in args[0] if isinstance(thing, Parts)), line)


def _row(reader: Reader, args: list[Values], line: Line) -> Values:
    return reader.row((reader.iterated(args[0], line),), exact=False, site=line) if args else reader.row((), site=line)


def _enumerate(reader: Reader, args: list[Values], line: Line) -> Values:
    return reader.row((reader.row((UNKNOWN, reader.iterated(args[0], line))),))


def _zip(reader: Reader, args: list[Values], line: Line) -> Values:
    return reader.row((reader.row([reader.iterated(values, line) for values in args]),))


def _map(reader: Reader, args: list[Values], line: Line) -> Values:
    return reader.row((reader.call(args[0], [reader.iterated(values, line) for values in args[1:]], {}, line),))


def _id(reader: Reader, args: list[Values], line: Line) -> Values:
    for thing in args[0]:
        if isinstance(thing, Access):
            thing.expect(ByIdentity)
    return UNKNOWN


def _getenv(reader: Reader, args: list[Values], line: Line) -> Values:
    owner = (reader.root(os.environ, "os.environ", line),)
    return reader.with_default(owner, args[0], args[1] if len(args) > 1 else constant(None), line) if args else UNKNOWN


FUNCTIONS: Mapping[Any, Callable[[Any, list[Values], Line], Values]] = MappingProxyType(
    {
        len: _len, isinstance: _isinstance, type: _type, getattr: _getattr, hasattr: _hasattr, setattr: _setattr,
        next: _next, iter: _row, list: _row, tuple: _row, reversed: _row, enumerate: _enumerate, zip: _zip, map: _map,
        id: _id, os.getenv: _getenv,
    }
)  # fmt: skip
